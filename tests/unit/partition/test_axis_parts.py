# SPDX-License-Identifier: Apache-2.0
"""Parts of axes in the axes of a grid, against the mesh's own arithmetic of ranks."""

import itertools

import numpy as np
import pytest

from sporeloom.partition.axis_parts import PartedAxes, UndividedAxisError, sharded_further
from sporeloom.strategy.mesh import Mesh


@pytest.mark.parametrize(
    ("degrees", "names"),
    [
        ({"dp": 4, "tp": 2}, ["dp:2", "dp/2"]),
        ({"dp": 2, "tp": 8}, ["tp:2", "tp/2"]),
        ({"dp": 8, "tp": 2}, ["dp:2", "dp/4"]),
        ({"tp": 4, "dp": 6}, ["dp:3", "tp:2"]),
        ({"dp": 2, "cp": 2, "tp": 2}, []),
    ],
    ids=str,
)
def test_a_part_of_an_axis_has_the_places_that_the_mesh_gives_it(degrees, names):
    mesh = Mesh(order=tuple(degrees), **degrees)
    axes = PartedAxes(degrees, [((name,),) for name in names])
    assert axes.grid.size == mesh.size
    for name, rank in itertools.product([*degrees, *names], range(mesh.size)):
        assert axes.grid.index(rank, axes.axes(name)) == mesh.coordinate(rank, name), (name, rank)
        assert axes.grid.degree(axes.axes(name)) == mesh.degree(name)


def test_halves_and_thirds_of_an_axis_do_not_go_together():
    with pytest.raises(UndividedAxisError, match="dp = 6 apart at 2 and at 3"):
        PartedAxes({"dp": 6}, [(("dp:2",), ("dp/3",))])


def test_an_axis_of_one_rank_shards_nothing():
    assert PartedAxes({"dp": 2, "tp": 1}, []).layout((("tp",), ("dp", "tp"))) == ((), ("dp",))


def ranks_that_share(degrees, layout, shards):
    """Rank -> (what its operators use, which share of that it holds), by going through the ranks in order."""
    mesh, seen, shares = Mesh(order=tuple(degrees), **degrees), {}, {}
    for rank in range(mesh.size):
        part = tuple(tuple(mesh.coordinate(rank, axis) for axis in dim) for dim in layout)
        shares[rank] = part, seen.setdefault(part, itertools.count()).__next__() % shards
    return shares


@pytest.mark.parametrize(
    ("degrees", "layout", "shards"),
    [
        ({"dp": 4, "tp": 2}, (("tp",), ()), 4),
        ({"dp": 4, "tp": 2}, (("tp",), ()), 2),
        ({"dp": 4, "tp": 2}, ((), ("tp",)), 4),
        ({"dp": 4, "tp": 2}, ((), ()), 8),
        ({"dp": 4, "tp": 2}, ((), ()), 4),
        ({"dp": 2, "tp": 4}, (("tp:2",), ()), 4),
        ({"dp": 4, "tp": 2}, (("dp/2",), ("tp",)), 2),
        ({"tp": 2, "dp": 4}, (("tp",), ()), 2),
        ({"dp": 2, "cp": 2, "tp": 2}, (("tp",), ()), 4),
        ({"dp": 2, "cp": 2, "tp": 2}, (("tp",), ()), 2),
    ],
    ids=str,
)
def test_those_who_hold_the_same_share_it_out_in_their_order(degrees, layout, shards):
    further = sharded_further(layout, degrees, shards)
    assert further[1:] == layout[1:] and further[0][: len(layout[0])] == layout[0]
    axes = PartedAxes(degrees, [further])
    assert axes.grid.degree(axes.layout((further[0][len(layout[0]) :],))[0]) == shards
    for rank, (_, share) in ranks_that_share(degrees, layout, shards).items():
        added = axes.layout((further[0][len(layout[0]) :],))[0]
        assert axes.grid.index(rank, added) == share, rank
    assert np.prod(list(degrees.values())) == axes.grid.size


def test_a_share_that_no_part_of_an_axis_makes_is_refused():
    with pytest.raises(UndividedAxisError, match="2 of the 4 ranks along dp:4"):
        sharded_further((("dp/4",), ()), {"dp": 8}, 2)


def test_an_axis_whose_degree_does_not_divide_the_number_of_shards_is_left_out_where_that_is_allowed():
    degrees = {"dp": 512, "tp": 12}
    assert sharded_further(((), ()), degrees, 256, skips=True) == (("dp/2",), ())
    assert sharded_further(((), ("tp",)), degrees, 256) == (("dp/2",), ("tp",))
    assert sharded_further(((),), {"dp": 4, "tp": 2}, 8, skips=True) == sharded_further(((),), {"dp": 4, "tp": 2}, 8)
    with pytest.raises(UndividedAxisError, match="4 of the 12 ranks along tp"):
        sharded_further(((), ()), degrees, 256)
    with pytest.raises(UndividedAxisError, match="have 5 ranks more"):
        sharded_further(((), ()), degrees, 5, skips=True)
