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


# All ranks in one array: the axes of the mesh come first, then the dims of what each rank holds.


def split_by_axes(value, layout: ValueLayout, degrees: dict):
    """What each rank holds of a value; of what is pending the whole."""
    shape = [n for size, axes in zip(value.shape, layout.dims, strict=True) for n in _taken_apart(size, axes, degrees)]
    places = [axis for axes in layout.dims for axis in (*axes, None)]
    order = [places.index(axis) for axis in degrees if axis in places]
    apart = value.reshape(shape).transpose([*order, *(i for i, axis in enumerate(places) if axis is None)])
    local = apart.shape[len(order) :]
    wide = apart.reshape([*(n if axis in places else 1 for axis, n in degrees.items()), *local])
    return np.broadcast_to(wide, (*degrees.values(), *local))


def _taken_apart(size: int, axes, degrees: dict) -> list:
    counts = [degrees[axis] for axis in axes]
    return [*counts, size // math.prod(counts)]


def spread_by_axes(value, layout: ValueLayout, degrees: dict, random):
    """As `spread`, of whole numbers."""
    held = split_by_axes(value, layout, degrees)
    pending = tuple(i for i, axis in enumerate(degrees) if axis in layout.partial)
    if not pending:
        return held
    varies = layout.partial.union(*layout.dims)
    shape = [n if axis in varies else 1 for axis, n in degrees.items()]
    addends = random.integers(-9, 10, (*shape, *held.shape[len(degrees) :])).astype(value.dtype)
    first = tuple(slice(0, 1) if i in pending else slice(None) for i in range(len(degrees)))
    own = held[tuple(slice(n) for n in addends[first].shape[: len(degrees)])]
    addends[first] += own - addends.sum(pending, keepdims=True)
    return np.broadcast_to(addends, held.shape)


def stepped_by_axes(held, step: Step, degrees: dict):
    """As `communicated`."""
    names, count = list(degrees), len(degrees)
    if step.kind in ("all_reduce", "reduce_scatter"):
        summed = held.sum(tuple(names.index(axis) for axis in step.axes), keepdims=True)
        held = np.broadcast_to(summed, held.shape)
    if step.kind in ("all_gather", "all_to_all"):
        for axis in reversed(step.axes):  # the innermost first
            moved = np.moveaxis(held, names.index(axis), count - 1 + step.dim)
            shape = list(moved.shape)
            shape[count - 1 + step.dim : count + 1 + step.dim] = [-1]
            whole = np.expand_dims(moved.reshape(shape), names.index(axis))
            held = np.broadcast_to(whole, (*degrees.values(), *whole.shape[count:]))
    if step.kind in ("slice", "reduce_scatter", "all_to_all"):
        dim = step.to_dim if step.kind == "all_to_all" else step.dim
        for axis in step.axes:  # the outermost first
            at = count + dim
            apart = held.reshape((*held.shape[:at], degrees[axis], -1, *held.shape[at + 1 :]))
            held = np.moveaxis(np.diagonal(apart, 0, names.index(axis), at), -1, names.index(axis))
    return held
