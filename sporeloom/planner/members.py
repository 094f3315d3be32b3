# SPDX-License-Identifier: Apache-2.0
"""Members that the units of a network (servers, racks, super nodes) connect, of groups of ranks and their counterparts.

All ranks wait for the slowest group of a kind, and groups differ where units are not multiples of them: of groups of 64
neighbours in racks of 72, the first is in one rack, and the second has 8 ranks in one and 56 in the next.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

Members = tuple[int, ...]
"""The fewest members of a group that any unit of each level has, of those units that it has members in; then its size."""


def fewest(units: tuple[int, ...], groups: NDArray[np.int64]) -> frozenset[Members]:
    """Members of each row of `groups`, ascending ranks. `units`: devices of a unit, each level."""
    places, size = groups.shape
    counts = np.full((places, len(units) + 1), size)
    for level, devices in enumerate(units):
        of = groups // devices
        begins = np.ones(groups.shape, bool)
        begins[:, 1:] = of[:, 1:] != of[:, :-1]
        first = np.flatnonzero(begins)  # in a unit, group after group
        in_unit = np.diff(first, append=groups.size)
        counts[:, level] = np.minimum.reduceat(in_unit, np.flatnonzero(first % size == 0))
    return frozenset(map(tuple, np.unique(counts, axis=0).tolist()))


@functools.lru_cache(maxsize=1 << 14)
def every(units: tuple[int, ...], size: int, stride: int, devices: int) -> frozenset[Members]:
    """Members of the groups of every `stride`-th rank that tile a job. `devices`: of the job; those of one block of groups
    if fewer."""
    if size == 1:
        return frozenset({(1,) * (len(units) + 1)})
    block = size * stride
    blocks = max(1, min(devices, math.lcm(block, *units)) // block)  # then they lie as the first ones again
    starts = np.arange(blocks)[:, None] * block + np.arange(stride)
    return fewest(units, starts.reshape(-1, 1) + np.arange(size) * stride)


@functools.lru_cache(maxsize=1 << 14)
def pairs(units: tuple[int, ...], apart: int, count: int) -> frozenset[Members]:
    """Members of the pairs of each of the first `count` ranks and the one `apart` from it."""
    starts = np.arange(min(count, math.lcm(*units)))
    return fewest(units, np.stack([starts, starts + apart], axis=1))


@functools.lru_cache(maxsize=1 << 14)
def counterparts(units: tuple[int, ...], ranks: tuple[int, ...], stage_size: int) -> frozenset[Members]:
    """Members of a group and of those that the other ranks of its first rank's stage are in, as they do the same at the same
    time.

    Args:
        ranks: of the group, ascending.
        stage_size: ranks of a pipeline stage.
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
    return fewest(units, first[:, None] + np.array(ranks) - ranks[0])
