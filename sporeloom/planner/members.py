# SPDX-License-Identifier: Apache-2.0
"""Members that the units of a network (servers, racks, super nodes) connect, of groups of ranks and their counterparts.

All ranks wait for the slowest group of a kind, and groups differ where units are not multiples of them: of groups of 64
neighbours in racks of 72, the first is in one rack, and the second has 8 ranks in one and 56 in the next. All of them send at
once, and share what leaves a unit.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sporeloom.strategy.mesh import Mesh


class Members(NamedTuple):
    """Members of a group by unit, and of the groups next to it."""

    counts: tuple[int, ...]
    """The fewest members of the group that any unit of each level has, of those units that it has members in; then its
    size."""
    senders: tuple[int, ...]
    """For the links inside a server, of each level and of the network: the largest number of devices of a unit below that
    send over them at once, those of all groups together."""

    @property
    def size(self) -> int:
        return self.counts[-1]


def members_of(
    units: tuple[int, ...], groups: NDArray[np.int64], sending: NDArray[np.int64] | None = None
) -> frozenset[Members]:
    """Members of each row of `groups`, ascending ranks. `units`: devices of a unit, each level; `sending`: the groups that
    send at once, if not just these."""
    places, size = groups.shape
    counts = np.full((places, len(units) + 1), size)
    for level, devices in enumerate(units):
        first = np.flatnonzero(_begins(groups // devices))  # in a unit, group after group
        in_unit = np.diff(first, append=groups.size)
        counts[:, level] = np.minimum.reduceat(in_unit, np.flatnonzero(first % size == 0))
    sending = groups if sending is None else sending
    below, within = (1, *units), (*units, int(sending.max()) + 1)
    senders = tuple(_senders(sending, *of) for of in zip(below, within, strict=True))
    return frozenset(Members(tuple(each), senders) for each in np.unique(counts, axis=0).tolist())


def _begins(of: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark members with which another unit, or another group, begins."""
    begins = np.ones(of.shape, bool)
    begins[:, 1:] = of[:, 1:] != of[:, :-1]
    return begins


def _senders(groups: NDArray[np.int64], below: int, within: int) -> int:
    """Largest number of ranks of a unit of `below` devices whose groups have members in others of the same `within`."""
    first = np.flatnonzero(_begins(groups // within))
    units = np.add.reduceat(_begins(groups // below).ravel().astype(np.int64), first)
    crosses = np.repeat(units > 1, np.diff(first, append=groups.size))
    ranks = np.unique(groups.ravel()[crosses])
    return int(np.bincount(ranks // below).max()) if ranks.size else 1


@functools.lru_cache(maxsize=1 << 14)
def every(units: tuple[int, ...], size: int, stride: int, devices: int) -> frozenset[Members]:
    """Members of the groups of every `stride`-th rank that tile a job. `devices`: of the job; those of one block of groups
    if fewer."""
    if size == 1:
        return frozenset({Members((1,) * (len(units) + 1), (1,) * (len(units) + 1))})
    block = size * stride
    blocks = max(1, min(devices, math.lcm(block, *units)) // block)  # then they lie as the first ones again
    starts = np.arange(blocks)[:, None] * block + np.arange(stride)
    return members_of(units, starts.reshape(-1, 1) + np.arange(size) * stride)


@functools.lru_cache(maxsize=1 << 14)
def along(units: tuple[int, ...], mesh: Mesh, axes: tuple[str, ...]) -> frozenset[Members]:
    """Members of the groups along some axes of a mesh, whatever their order."""
    ranks = np.arange(mesh.size)
    first = ranks.copy()
    for axis in axes:
        first -= mesh.stride(axis) * (ranks // mesh.stride(axis) % mesh.degree(axis))
    size = math.prod(mesh.degree(axis) for axis in axes)
    return members_of(units, np.argsort(first, kind="stable").reshape(-1, size))


@functools.lru_cache(maxsize=1 << 14)
def pairs(units: tuple[int, ...], apart: int, count: int) -> frozenset[Members]:
    """Members of the pairs of each of the first `count` ranks and the one `apart` from it."""
    starts = np.arange(min(count, math.lcm(*units)))
    return members_of(units, np.stack([starts, starts + apart], axis=1))


@functools.lru_cache(maxsize=1 << 14)
def counterparts(units: tuple[int, ...], ranks: tuple[int, ...], stage_size: int, devices: int) -> frozenset[Members]:
    """Members of a group and of those that the other ranks of its first rank's stage are in, as they do the same at the same
    time. The other stages send meanwhile, too.

    Args:
        ranks: of the group, ascending.
        stage_size: ranks of a pipeline stage.
        devices: of the job.
    """
    begin = ranks[0] // stage_size * stage_size if stage_size else ranks[0]
    offsets = [rank - ranks[0] for rank in ranks if rank < begin + stage_size]
    free, starts = set(range(begin, begin + stage_size)), list[int]()
    for rank in range(begin, begin + stage_size):
        if rank in free:
            starts.append(rank)
            free.difference_update(rank + offset for offset in offsets)
    complete = len(starts) * len(offsets) == stage_size and ranks[0] in starts
    first = np.array(starts if complete else [ranks[0]])
    groups = first[:, None] + np.array(ranks) - ranks[0]
    if not complete or devices <= stage_size:
        return members_of(units, groups)
    stages = (groups + shift for shift in range(-begin, devices - begin, stage_size))
    inside = np.concatenate([of for of in stages if of[-1, -1] < devices])
    return members_of(units, groups, inside)
