# SPDX-License-Identifier: Apache-2.0
"""Layouts of values in a sharded graph: mesh axes that shard each dim, and axes over which a partial sum is pending."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sporeloom.partition.grid import DeviceGrid
from sporeloom.strategy.layout import Dim, Layout, Shape, show

NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """The layout of one value across the ranks.

    The full value is the sum of the local values over the ranks along the axes of `partial`, and the concatenation of the
    shards along the axes of `dims`. No axis occurs twice.
    """

    dims: Layout
    partial: frozenset[str] = NONE

    def __post_init__(self) -> None:
        axes = [axis for dim in self.dims for axis in dim]
        assert len(set(axes)) == len(axes) and not self.partial & set(axes), self

    @property
    def axes(self) -> frozenset[str]:
        """Axes that shard some dim."""
        return frozenset(axis for dim in self.dims for axis in dim)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the full value."""
        return not self.partial and not any(self.dims)

    def local_shape(self, shape: Shape, grid: DeviceGrid) -> Shape:
        """Local shape of a value of this global shape."""
        return tuple(size // grid.degree(dim) for size, dim in zip(shape, self.dims, strict=True))

    def reduced(self) -> ValueLayout:
        """The same sharding without partial sums."""
        return ValueLayout(self.dims) if self.partial else self

    def __str__(self) -> str:
        pending = "".join(f" + sum over {axis}" for axis in sorted(self.partial))
        return show(self.dims) + pending


def replicated(num_dims: int) -> ValueLayout:
    return ValueLayout(((),) * num_dims)


def fitted(dims: Sequence[Iterable[str]], shape: Shape, grid: DeviceGrid, taken: Collection[str] = ()) -> Layout:
    """For each dim, the requested axes that can shard it: they divide its size and shard no other dim, nor are they
    `taken`.

    Axes after the first one that cannot shard the dim are dropped as well, so shards stay contiguous in axis order.
    """
    used = set(taken)
    result: list[Dim] = []
    for size, dim in zip(shape, dims, strict=True):
        kept: list[str] = []
        for axis in dim:
            if axis in used or size % (grid.degree(kept) * grid.degrees[axis]):
                break
            kept.append(axis)
            used.add(axis)
        result.append(tuple(kept))
    return tuple(result)
