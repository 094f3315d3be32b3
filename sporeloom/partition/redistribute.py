# SPDX-License-Identifier: Apache-2.0
"""Redistribution between two layouts of a value: local slices where a rank holds more than it needs, else collectives.

Source: the algebra of shards and partial sums is that of GSPMD (arXiv:2105.04663) and PyTorch's DTensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from sporeloom.partition.grid import MICROBATCHES, DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.strategy.layout import Dim

T = TypeVar("T")
StepKind = Literal["slice", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Step:
    """One slice or collective, performed by all ranks."""

    kind: StepKind
    axes: Dim
    """Axes of the communication group. For a slice: axes whose index selects the shard."""
    layout: ValueLayout
    """The layout after the step."""
    dim: int = 0
    """The dim that is sliced, scattered or gathered; the gathered one of an all-to-all."""
    to_dim: int = 0
    """The dim that an all-to-all shards."""


def redistribution(source: ValueLayout, target: ValueLayout, grid: DeviceGrid) -> list[Step]:
    """Steps from `source` to `target`, in order; empty if they are equal.

    Steps without communication come first, then those that shrink the local value or move shards, and those that enlarge it
    last, so that little is sent. Partial sums that are pending in `target` stay pending.
    """
    assert target.partial <= source.partial and len(source.dims) == len(target.dims), (source, target)
    walk = _Walk(source, target, grid)
    kinds = [walk.sums_over_microbatches, walk.slices, walk.scatters, walk.moves, walk.reduces, walk.gathers]
    if grid.scatters_first:
        kinds.insert(0, walk.scatters)
    while walk.dims != list(target.dims) or walk.due:
        any(takes() for takes in kinds)
    return walk.steps


class _Walk:
    """The layout during redistribution. Each method takes steps of one kind as far as possible and returns whether it
    took any."""

    def __init__(self, source: ValueLayout, target: ValueLayout, grid: DeviceGrid):
        self.grid, self.target = grid, target
        self.dims, self.pending = list(source.dims), source.partial
        self.steps: list[Step] = []

    @property
    def due(self) -> frozenset[str]:
        return self.pending - self.target.partial

    def missing(self, dim: int) -> Dim:
        """Axes by which the target shards a dim further; empty if it shards the dim differently."""
        have, want = self.dims[dim], self.target.dims[dim]
        return want[len(have) :] if want[: len(have)] == have else ()

    def take(self, kind: StepKind, axes: Dim, dim: int = 0, to_dim: int = 0) -> None:
        layout = ValueLayout(tuple(self.dims), self.pending)
        self.steps.append(Step(kind, axes, layout, dim, to_dim))

    def sums_over_microbatches(self) -> bool:
        """Sum over microbatches before all else but `scatters_first`, so that the further steps run once for all."""
        if MICROBATCHES not in self.due:
            return False
        self.pending -= {MICROBATCHES}
        self.take("all_reduce", (MICROBATCHES,))
        return True

    def slices(self) -> bool:
        taken = False
        for dim in range(len(self.dims)):
            used = {axis for axes in self.dims for axis in axes} | self.pending
            free = tuple(itertools.takewhile(lambda axis: axis not in used, self.missing(dim)))  # noqa: B023 (at once)
            for run in self.grid.runs(free):
                self.dims[dim] += run
                self.take("slice", run, dim)
                taken = True
        return taken

    def scatters(self) -> bool:
        taken = False
        for dim in range(len(self.dims)):
            for run in self.grid.runs(_leading(self.missing(dim), self.due.__contains__)):
                self.dims[dim] += run
                self.pending -= set(run)
                self.take("reduce_scatter", run, dim)
                taken = True
        return taken

    def moves(self) -> bool:
        """Move an axis that shards one dim, and is the next to shard another, by an all-to-all."""
        for dim, have in enumerate(self.dims):
            if not have or self.target.dims[dim][: len(have)] == have:
                continue
            for to_dim in range(len(self.dims)):
                if to_dim != dim and self.missing(to_dim)[:1] == have[-1:]:
                    self.dims[dim], self.dims[to_dim] = have[:-1], self.dims[to_dim] + have[-1:]
                    self.take("all_to_all", have[-1:], dim, to_dim)
                    return True
        return False

    def reduces(self) -> bool:
        if not self.due:
            return False
        axes = self.grid.in_order(self.due)
        self.pending -= self.due
        self.take("all_reduce", axes)
        return True

    def gathers(self) -> bool:
        """All-gather a dim. If one of its axes is to shard another dim next, gather only the axes inside of it: it is
        then moved."""
        moved = {axis for dim in range(len(self.dims)) for axis in self.missing(dim)[:1]}
        for dim, have in enumerate(self.dims):
            want = self.target.dims[dim]
            common = len(_leading(list(zip(have, want, strict=False)), lambda pair: pair[0] == pair[1]))
            if len(have) > common:
                kept = max((at + 1 for at, axis in enumerate(have) if axis in moved), default=common)
                run = self.grid.runs(have[max(kept, common) :])[-1]  # the innermost first
                self.dims[dim] = have[: len(have) - len(run)]
                self.take("all_gather", run, dim)
                return True
        return False


def _leading(items: Sequence[T], is_wanted: Callable[[T], bool]) -> tuple[T, ...]:
    """The items before the first that does not satisfy a condition."""
    return tuple(itertools.takewhile(is_wanted, items))
