# SPDX-License-Identifier: Apache-2.0
"""Ranks as a grid over axes that nothing divides any further."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from sporeloom.strategy.layout import Dim

STAGES = "pp"
"""The axis of the stages of a pipeline, by which no value is sharded: where there is one it is the outermost, but for"""
MICROBATCHES = "microbatches"
"""the axis of the microbatches that each rank computes one after another, as if they were ranks. A step along it goes with no
other axis, for it is no communication: see `partition/microbatches.py`."""


class DeviceGrid:
    """Ranks 0 .. size-1 at the coordinates of axes.

    Args:
        degrees: axis -> number of ranks along it, outer to inner: neighbouring ranks differ in the last one.
    """

    def __init__(self, degrees: Mapping[str, int]):
        self.degrees = dict(degrees)
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
        """The ranks that differ from `rank` along `axes` only, by their `index` along these."""
        base = rank - sum(self._strides[axis] * self.coordinate(rank, axis) for axis in axes)
        steps = [[self._strides[axis] * place for place in range(self.degrees[axis])] for axis in axes]
        return [base + sum(offsets) for offsets in itertools.product(*steps)]

    def in_order(self, axes: Iterable[str]) -> Dim:
        """`axes`, outer to inner as the grid has them: ranks of a group then ascend."""
        return tuple(sorted(axes, key=self._order.__getitem__))

    def runs(self, axes: Sequence[str]) -> list[Dim]:
        """`axes` in as few consecutive parts as possible, each in the grid's order, for collectives over ascending ranks. The
        axis of microbatches is a part of its own."""
        parts: list[list[str]] = []
        for axis in axes:
            is_alone = MICROBATCHES in (axis, *(parts[-1] if parts else ()))
            if parts and not is_alone and self._order[parts[-1][-1]] < self._order[axis]:
                parts[-1].append(axis)
            else:
                parts.append([axis])
        return [tuple(part) for part in parts]
