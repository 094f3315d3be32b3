# SPDX-License-Identifier: Apache-2.0
"""Redistribution between all pairs of layouts gives the same value, and sends no more than it has to."""

import itertools

import numpy as np
import pytest
from ranks import communicated, gathered, split_by_axes, spread_by_axes, stepped_by_axes

from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.redistribute import redistribution

MESHES = [
    *({"a": n} for n in range(2, 9)),
    *({"a": outer, "b": inner} for outer, inner in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2))),
    {"a": 2, "b": 2, "c": 2},
]


def all_layouts(axes, num_dims):
    """Every way to give each axis to a dim, in every order, to a pending sum, or to nothing."""
    for places in itertools.product(range(num_dims + 2), repeat=len(axes)):
        by_dim = [[a for a, p in zip(axes, places, strict=True) if p == dim] for dim in range(num_dims)]
        pending = frozenset(a for a, p in zip(axes, places, strict=True) if p == num_dims)
        for orders in itertools.product(*(itertools.permutations(dim) for dim in by_dim)):
            yield ValueLayout(tuple(orders), pending)


def off(degrees, num_dims):
    """All pairs of layouts in which a value of so many dims is another afterwards, and how many pairs there are."""
    grid, random = DeviceGrid(degrees), np.random.default_rng(0)
    value = random.integers(-99, 100, [grid.size * (2 if dim == 1 else 1) for dim in range(num_dims)])
    layouts = list(all_layouts(list(degrees), num_dims))
    expected = {each.dims: split_by_axes(value, each, degrees) for each in layouts}
    wrong, count = [], 0
    for source in layouts:
        spread_out = spread_by_axes(value, source, degrees, random)
        for target in layouts:
            if not target.partial <= source.partial:
                continue
            held, layout = spread_out, source
            for step in (steps := redistribution(source, target, grid)):
                assert grid.in_order(step.axes) == step.axes  # ranks of a group ascend
                held, layout = stepped_by_axes(held, step, degrees), step.layout
            pending = tuple(i for i, axis in enumerate(degrees) if axis in target.partial)
            summed = held.sum(pending, keepdims=True) if pending else held
            whole = expected[target.dims]
            is_right = layout == target and held.shape == whole.shape and (summed == whole).all()
            wrong += [] if is_right else [f"{source} -> {target}: {steps}"]
            count += 1
    return wrong, count


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_between_all_pairs_of_layouts_the_value_stays_the_same(degrees, num_dims):
    wrong, count = off(degrees, num_dims)
    assert count and not wrong, f"{len(wrong)} of {count}, the first: {wrong[0]}"


def test_there_are_as_many_pairs():
    """Of layouts without and with pending sums: each axis goes to one of 3 dims, to a sum, or to nothing."""
    layouts = list(all_layouts("abc", 3))
    assert len(layouts) == len(set(layouts)) == 8 + 3 * 4 * 3 + 3 * 2 * 12 + 60
    assert sum(b.partial <= a.partial for a in layouts for b in layouts) > 10_000


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_in_one_array_do_what_each_does(seed):
    """The tests above are right about collectives: beside a list of what each rank holds."""
    degrees, random = MESHES[-1 - seed % 6], np.random.default_rng(seed)
    grid, layouts = DeviceGrid(degrees), list(all_layouts(list(degrees), 2))
    value = random.integers(-99, 100, (grid.size * 2, grid.size))
    source, target = (layouts[i] for i in random.integers(0, len(layouts), 2))
    target = ValueLayout(target.dims, target.partial & source.partial)
    held = spread_by_axes(value, source, degrees, random)
    of_ranks = list(held.reshape((grid.size, *held.shape[len(degrees) :])))
    np.testing.assert_array_equal(gathered(of_ranks, source, grid), value)
    for step in redistribution(source, target, grid):
        held = stepped_by_axes(held, step, degrees)
        of_ranks = communicated(step.kind, of_ranks, step.axes, grid, step.dim, step.to_dim)
        for mine, own in zip(held.reshape((grid.size, *held.shape[len(degrees) :])), of_ranks, strict=True):
            np.testing.assert_array_equal(mine, own)


def kinds(source, target, degrees):
    return [step.kind for step in redistribution(source, target, DeviceGrid(degrees))]


def layout(*dims, partial=()):
    return ValueLayout(tuple(tuple(dim.split()) for dim in dims), frozenset(partial))


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (layout("", ""), layout("dp", "tp"), ["slice", "slice"]),
        (layout("dp", ""), layout("", "dp"), ["all_to_all"]),
        (layout("dp", "", partial=["tp"]), layout("dp", ""), ["all_reduce"]),
        (layout("dp", "", partial=["tp"]), layout("dp tp", ""), ["reduce_scatter"]),
        (layout("", "", partial=["dp"]), layout("", "tp"), ["slice", "all_reduce"]),
        (layout("tp", "", partial=["dp"]), layout("", "dp"), ["reduce_scatter", "all_gather"]),
        (layout("tp", "", partial=["dp"]), layout("dp", "tp"), ["all_to_all", "reduce_scatter"]),
        (layout("", "", partial=["dp", "tp"]), layout("", ""), ["all_reduce"]),
        (layout("dp tp", ""), layout("", ""), ["all_gather"]),
        (layout("tp dp", ""), layout("", ""), ["all_gather", "all_gather"]),
        (layout("dp tp", ""), layout("dp", "tp"), ["all_to_all"]),
        (layout("dp tp", ""), layout("", "dp"), ["all_gather", "all_to_all"]),  # tp alone is gathered
        (layout("", "", partial=["dp"]), layout("", "", partial=["dp"]), []),
    ],
    ids=str,
)
def test_the_cheapest_steps_are_taken(source, target, expected):
    assert kinds(source, target, {"dp": 2, "tp": 2}) == expected
