# SPDX-License-Identifier: Apache-2.0
"""The ranks as a grid over mesh axes that are not divided further."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from sporeloom.strategy.layout import Dim

STAGES = "pp"
"""The axis of pipeline stages, which shards no value; if present, it is the outermost axis but for MICROBATCHES."""
MICROBATCHES = "microbatches"
"""The axis of the microbatches, which each rank computes in turn, modelled as if they were ranks. A redistribution step
along it uses no other axis, because it needs no communication: see `partition/microbatches.py`."""


class DeviceGrid:
    """Ranks 0 .. size-1 as coordinates on named axes.

    Args:
        degrees: axis -> number of ranks along it, outer to inner: neighbouring ranks differ in the last one.
        scatters_first: whether sums over MICROBATCHES are of shards where the sum is to be sharded: gradients of each
            microbatch are reduce-scattered, instead of their sum.
    """

    def __init__(self, degrees: Mapping[str, int], scatters_first: bool = False):
        self.degrees, self.scatters_first = dict(degrees), scatters_first
        self.size = math.prod(self.degrees.values())
        self._order = {axis: position for position, axis in enumerate(self.degrees)}
        strides, stride = {}, 1
        for axis in reversed(self.degrees):
            strides[axis] = stride
            stride *= self.degrees[axis]
        self._strides = strides

    def degree(self, axes: Iterable[str]) -> int:
        """Number of ranks along all of `axes` together."""
        return math.prod(self.degrees[axis] for axis in axes)

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self._strides[axis] % self.degrees[axis]

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Position of `rank` among the shards of a dim that `axes` shard, the first of them outermost."""
        index = 0
        for axis in axes:
            index = index * self.degrees[axis] + self.coordinate(rank, axis)
        return index

    def group(self, rank: int, axes: Sequence[str]) -> list[int]:
        """The communication group of `rank` along `axes`: ranks that differ from it along these only, ordered by their
        `index`."""
        base = rank - sum(self._strides[axis] * self.coordinate(rank, axis) for axis in axes)
        steps = [[self._strides[axis] * place for place in range(self.degrees[axis])] for axis in axes]
        return [base + sum(offsets) for offsets in itertools.product(*steps)]

    def in_order(self, axes: Iterable[str]) -> Dim:
        """`axes` from outer to inner in the grid's order, in which the ranks of a group ascend."""
        return tuple(sorted(axes, key=self._order.__getitem__))

    def runs(self, axes: Sequence[str]) -> list[Dim]:
        """Split `axes` into as few runs as possible, each in the grid's order, for collectives over ascending ranks.
        MICROBATCHES is always a run by itself."""
        parts: list[list[str]] = []
        for axis in axes:
            is_alone = MICROBATCHES in (axis, *(parts[-1] if parts else ()))
            if parts and not is_alone and self._order[parts[-1][-1]] < self._order[axis]:
                parts[-1].append(axis)
            else:
                parts.append([axis])
        return [tuple(part) for part in parts]
