# SPDX-License-Identifier: Apache-2.0
"""Divides mesh axes where layouts name parts of them (see `Mesh.parted`): the parts become the axes of the grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

from sporeloom.partition.grid import DeviceGrid
from sporeloom.strategy.layout import Dim, Layout
from sporeloom.strategy.mesh import part_of_axis


class UndividedAxisError(ValueError):
    """Layouts name parts of an axis that are incompatible."""


class PartedAxes:
    """A grid whose axes can represent every axis and part of an axis that `layouts` name.

    Args:
        degrees: mesh axis -> number of ranks along it, outer to inner; axes of degree 1 are dropped.
        layouts: layouts that name axes and parts of axes.

    Raises:
        UndividedAxisError: layouts divide an axis incompatibly, for example in halves and in thirds.
    """

    def __init__(self, degrees: Mapping[str, int], layouts: Iterable[Layout]):
        cuts: dict[str, set[int]] = {axis: {1, degree} for axis, degree in degrees.items() if degree > 1}
        for layout in layouts:
            for dim in layout:
                for name in dim:
                    axis, outer, inner = part_of_axis(name)
                    if axis in cuts and (outer or inner):
                        cuts[axis].add(outer or inner)
        grid: dict[str, int] = {}
        self._parts: dict[str, list[tuple[str, int, int]]] = {}
        for axis, found in cuts.items():
            bounds = sorted(found)
            for low, high in itertools.pairwise(bounds):
                if high % low:
                    raise UndividedAxisError(f"layouts take {axis} = {degrees[axis]} apart at {low} and at {high}")
                name = _named(axis, low, high, degrees[axis])
                grid[name] = high // low
                self._parts.setdefault(axis, []).append((name, low, high))
        self.grid = DeviceGrid(grid)

    def axes(self, name: str) -> Dim:
        """The grid axes that make up a mesh axis or part of one; empty if its degree is 1."""
        axis, outer, inner = part_of_axis(name)
        parts = self._parts.get(axis, [])
        return tuple(part for part, low, high in parts if (not outer or high <= outer) and low >= inner)

    def layout(self, layout: Layout) -> Layout:
        return tuple(tuple(part for name in dim for part in self.axes(name)) for dim in layout)


def _named(axis: str, low: int, high: int, degree: int) -> str:
    """The name of a part of an axis, in the form of `Mesh.parted`."""
    if (low, high) == (1, degree):
        return axis
    if low == 1:
        return f"{axis}:{high}"
    return f"{axis}/{low}" if high == degree else f"{axis}/{low}:{high}"


def sharded_further(layout: Layout, degrees: Mapping[str, int], shards: int, skips: bool = False) -> Layout:
    """Shard dim 0 of `layout` over `shards` of the ranks that replicate it, neighbouring ranks (innermost axes) first.

    Args:
        skips: whether an axis is left out whose degree does not divide what is left of `shards`, such as tp 12 of 256.

    Raises:
        UndividedAxisError: these ranks are a part of an axis that has no name.
    """
    added: list[str] = []
    for name in reversed(_free(layout, degrees)):
        if shards == 1:
            break
        axis, outer, inner = part_of_axis(name)
        degree = outer or degrees[axis] // (inner or 1)
        taken = math.gcd(degree, shards)
        if skips and taken < degree and taken < shards:
            continue
        shards //= taken
        if taken == degree:
            added.insert(0, name)
        elif shards > 1 or outer:
            raise UndividedAxisError(
                f"{taken} of the {degree} ranks along {name}, besides ranks along other axes, shard a parameter"
            )
        else:
            added.insert(0, f"{axis}/{degrees[axis] // taken}")
    if shards > 1:
        raise UndividedAxisError(f"no axes that replicate a parameter have {shards} ranks more to shard it over")
    return ((*layout[0], *added), *layout[1:])


def _free(layout: Layout, degrees: Mapping[str, int]) -> list[str]:
    """Axes and parts of axes along which the layout is replicated, outer to inner."""
    used = {name for dim in layout for name in dim}
    free = []
    for axis, degree in degrees.items():
        of_axis = [part_of_axis(name) for name in used if part_of_axis(name)[0] == axis]
        if degree == 1 or axis in used or len(of_axis) > 1:
            continue
        if not of_axis:
            free.append(axis)
        else:
            ((_, outer, inner),) = of_axis
            free.append(f"{axis}/{outer}" if outer else f"{axis}:{inner}")
    return free
