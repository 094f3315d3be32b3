# SPDX-License-Identifier: Apache-2.0
"""All ranks of a grid at once, in NumPy: what they hold of a value, and what collectives make of it."""

import math

import numpy as np

from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.redistribute import Step


def shard(value, layout: ValueLayout, rank: int, grid: DeviceGrid):
    """What `rank` holds of the dims of a value of which nothing is pending."""
    slices = []
    for size, axes in zip(value.shape, layout.dims, strict=True):
        length = size // grid.degree(axes)
        start = grid.index(rank, axes) * length
        slices.append(slice(start, start + length))
    return value[(*slices, ...)]


def spread(value, layout: ValueLayout, grid: DeviceGrid, random) -> list:
    """What each rank holds of a value: the addends of a pending sum are random, of whole numbers, so sums are exact."""
    by_place = {}
    order = grid.in_order(layout.partial)
    num_addends = math.prod(grid.degrees[axis] for axis in order)
    held = []
    for rank in range(grid.size):
        own = shard(value, layout, rank, grid)
        if not order:
            held.append(own.copy())
            continue
        place = tuple(grid.index(rank, axes) for axes in layout.dims)
        if place not in by_place:
            addends = [random.integers(-9, 10, own.shape).astype(value.dtype) for _ in range(num_addends - 1)]
            by_place[place] = [*addends, own - sum(addends, np.zeros_like(own))]
        held.append(by_place[place][grid.index(rank, order)])
    return held


def gathered(held: list, layout: ValueLayout, grid: DeviceGrid):
    """The value; all ranks that hold the same part must agree."""
    shape = tuple(size * grid.degree(axes) for size, axes in zip(held[0].shape, layout.dims, strict=True))
    value, order = np.zeros(shape, held[0].dtype), grid.in_order(layout.partial)
    seen = {}
    for rank, own in enumerate(held):
        key = (*(grid.index(rank, axes) for axes in layout.dims), grid.index(rank, order))
        if key in seen:
            # NumPy's exp and the like differ in the last bit by where in an array a number stands.
            np.testing.assert_allclose(own, seen[key], rtol=1e-14, atol=1e-14)
            continue
        seen[key] = own
        shard(value, layout, rank, grid)[...] += own
    return value


REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def communicated(kind: str, held: list, axes, grid: DeviceGrid, dim: int = 0, to_dim: int = 0, op: str = "sum") -> list:
    """What all ranks have after a collective over `axes`, or after each took its slice."""
    result = []
    for rank, own in enumerate(held):
        group = grid.group(rank, axes)
        place, count = group.index(rank), len(group)
        if kind == "slice":
            result.append(np.split(own, count, dim)[place])
        elif kind in ("all_reduce", "reduce_scatter"):
            total = REDUCTIONS[op].reduce([held[other] for other in group])
            result.append(total if kind == "all_reduce" else np.split(total, count, dim)[place])
        elif kind == "all_gather":
            result.append(np.concatenate([held[other] for other in group], dim))
        elif kind == "all_to_all":
            result.append(np.concatenate([np.split(held[other], count, to_dim)[place] for other in group], dim))
        else:
            raise AssertionError(kind)
    return result


def redistributed(held: list, steps: list[Step], grid: DeviceGrid) -> list:
    for step in steps:
        held = communicated(step.kind, held, step.axes, grid, step.dim, step.to_dim)
    return held
