# SPDX-License-Identifier: Apache-2.0
"""The part of a tensor that a rank, a file or a reader has: the only class for it, used by layouts and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sporeloom.strategy.layout import Layout, Shape


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The entries of a tensor from index `start` on, `shape` of them in each dim."""

    start: Shape
    shape: Shape

    @classmethod
    def full(cls, shape: Sequence[int]) -> TensorSlice:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def shard(cls, global_shape: Sequence[int], indices: Sequence[int], counts: Sequence[int]) -> TensorSlice:
        """Shard number `indices[dim]` of `counts[dim]` equal ones along each dim."""
        shape = tuple(size // count for size, count in zip(global_shape, counts, strict=True))
        return cls(tuple(index * size for index, size in zip(indices, shape, strict=True)), shape)

    @property
    def stop(self) -> Shape:
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """NumPy's index of the full tensor."""
        return tuple(map(slice, self.start, self.stop))

    @property
    def num_entries(self) -> int:
        return math.prod(self.shape)

    def rows(self, index: int, count: int) -> TensorSlice:
        """Shard number `index` of `count` equal ones of it along dim 0."""
        size = self.shape[0] // count
        return TensorSlice((self.start[0] + index * size, *self.start[1:]), (size, *self.shape[1:]))

    def overlap(self, other: TensorSlice) -> TensorSlice | None:
        """The entries that both have; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(first >= end for first, end in zip(start, stop, strict=True)):
            return None
        return TensorSlice(start, tuple(end - first for first, end in zip(start, stop, strict=True)))

    def within(self, outer: TensorSlice) -> TensorSlice:
        """The same entries, counted from where `outer` begins."""
        return TensorSlice(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def rank_slice(
    global_shape: Shape, layout: Layout, degree: Callable[[str], int], coordinate: Callable[[str], int]
) -> TensorSlice:
    """The shard that a rank has of a tensor in a layout.

    Args:
        degree: number of ranks along an axis.
        coordinate: position of the rank along an axis.
    """
    indices, counts = [], []
    for dim in layout:
        index, count = 0, 1
        for axis in dim:  # the first axis is the outermost
            index, count = index * degree(axis) + coordinate(axis), count * degree(axis)
        indices.append(index)
        counts.append(count)
    return TensorSlice.shard(global_shape, indices, counts)
