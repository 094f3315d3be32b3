# SPDX-License-Identifier: Apache-2.0
"""Redistribution between all pairs of layouts gives the same value, and sends no more than it has to."""

import itertools

import numpy as np
import pytest
from ranks import gathered, redistributed, spread

from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.redistribute import redistribution

GRIDS = [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}, {"dp": 3, "tp": 2}, {"tp": 2, "dp": 3}]


def all_layouts(axes, num_dims):
    """Every way to give each axis to a dim, in every order, to a pending sum, or to nothing."""
    for places in itertools.product(range(num_dims + 2), repeat=len(axes)):
        by_dim = [[a for a, p in zip(axes, places, strict=True) if p == dim] for dim in range(num_dims)]
        pending = frozenset(a for a, p in zip(axes, places, strict=True) if p == num_dims)
        for orders in itertools.product(*(itertools.permutations(dim) for dim in by_dim)):
            yield ValueLayout(tuple(orders), pending)


@pytest.mark.parametrize("degrees", GRIDS, ids=str)
@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_between_all_pairs_of_layouts_the_value_stays_the_same(degrees, num_dims):
    grid, random = DeviceGrid(degrees), np.random.default_rng(0)
    value = random.integers(-99, 100, (grid.size * 2,) * num_dims if num_dims < 3 else (grid.size,) * 3)
    layouts = list(all_layouts(list(degrees), num_dims))
    pairs = [(a, b) for a in layouts for b in layouts if b.partial <= a.partial]
    if len(pairs) > 1500:
        pairs = [pairs[i] for i in random.choice(len(pairs), 1500, replace=False)]
    for source, target in pairs:
        steps = redistribution(source, target, grid)
        held = redistributed(spread(value, source, grid, random), steps, grid)
        np.testing.assert_array_equal(gathered(held, target, grid), value, err_msg=f"{source} -> {target}: {steps}")
        assert (steps[-1].layout if steps else source) == target


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
