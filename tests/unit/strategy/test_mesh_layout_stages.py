# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from sporeloom.strategy.checks import strategy_problems
from sporeloom.strategy.config import Pipeline, Recompute, Stages, Strategy
from sporeloom.strategy.layout import LayoutError, degrees, local_shape, show
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.stages import (
    in_proportion,
    layers_of_stages,
    layers_per_part,
    layers_per_stage,
    recomputed_layers,
    stage_of_layers,
)

MESH = Mesh(pp=2, dp=3, tp=4)


def test_tp_is_the_innermost_axis_and_pp_the_outermost():
    places = [(MESH.coordinate(r, "pp"), MESH.coordinate(r, "dp"), MESH.coordinate(r, "tp")) for r in range(MESH.size)]
    assert places == sorted(places)
    assert places[0] == (0, 0, 0)
    assert places[1] == (0, 0, 1)
    assert places[-1] == (1, 2, 3)


def test_the_order_in_which_axes_are_given_is_the_order_of_ranks():
    mesh = Mesh(tp=2, dp=2)
    assert [(mesh.coordinate(r, "tp"), mesh.coordinate(r, "dp")) for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert mesh != Mesh(dp=2, tp=2)
    assert Mesh(tp=2, dp=1) == Mesh(tp=2)
    assert strategy_problems(Strategy(mesh=Mesh(pp=2, tp=2, cp=2), pipeline=Pipeline(num_microbatches=2))) == []
    assert dataclasses.replace(mesh, tp=4).group(0, "tp") == [0, 2, 4, 6]
    assert str(Mesh(pp=2, dp=2, cp=2, tp=2)) == "pp 2 x dp 2 x cp 2 x tp 2 = 16"


def test_a_group_differs_along_its_axes_only():
    mesh = Mesh(pp=2, dp=4, ep=2, tp=2)
    assert mesh.group(5, "tp") == [4, 5]
    assert (mesh.group(5, "ep"), mesh.group(9, "ep", "tp")) == ([5, 7], [8, 9, 10, 11])
    assert mesh.group(5, mesh.expert_axes[0]) == [1, 5]
    assert mesh.group(5, "dp", "ep") == mesh.group(5, "ep", "dp") == [1, 3, 5, 7]
    assert mesh.group(9, "pp") == [1, 9]
    assert list(mesh.ranks_of_stage(1)) == mesh.group(8, "dp", "ep", "tp") == list(range(8, 16))
    assert mesh.rank_at({axis: mesh.coordinate(13, axis) for axis in mesh.order}) == 13
    assert mesh.sharding_axes == {"dp": 4, "tp": 2}


def test_expert_parallel_ranks_are_neighbours_along_dp():
    assert Mesh(ep=2, tp=2) == Mesh(dp=2, ep=2, tp=2) != Mesh(dp=2, tp=2)
    assert str(Mesh(dp=4, ep=2, tp=2)) == "pp 1 x dp 4 (ep 2) x tp 2 = 8"
    (problem,) = strategy_problems(Strategy(mesh=Mesh(dp=2, ep=4)))
    assert "mesh.ep = 4 does not divide mesh.dp = 2" in problem and "1, 2" in problem


EP_BEYOND_DP = [
    # dp, tp, ep -> axes of ep, what of tp shards each expert, the ranks that share out the experts with rank 3
    (2, 2, 4, ("dp", "tp"), (), [0, 1, 2, 3]),
    (2, 4, 4, ("dp", "tp:2"), ("tp/2",), [1, 3, 5, 7]),
    (1, 4, 4, ("tp",), (), [0, 1, 2, 3]),
    (1, 4, 2, ("tp:2",), ("tp/2",), [1, 3]),
    (4, 2, 4, ("dp",), ("tp",), [1, 3, 5, 7]),
]


@pytest.mark.parametrize(("dp", "tp", "ep", "axes", "rest", "group"), EP_BEYOND_DP)
def test_experts_may_be_sharded_over_all_of_dp_and_a_part_of_tp(dp, tp, ep, axes, rest, group):
    mesh = Mesh(dp=dp, ep=ep, tp=tp)
    assert mesh.expert_parts == ((), axes, rest)
    assert mesh.group(3, "ep") == group and len(group) == ep
    assert [mesh.coordinate(rank, "ep") for rank in group] == list(range(ep))
    assert not strategy_problems(Strategy(mesh=mesh))
    held_alike = mesh.group(3, *rest)
    assert all(mesh.coordinate(rank, "ep") == mesh.coordinate(3, "ep") for rank in held_alike)


@pytest.mark.parametrize(
    "strategy",
    [Strategy(mesh=Mesh(dp=2, ep=4, tp=2), engine="mindspore"), Strategy(mesh=Mesh(pp=2, dp=2, ep=4, tp=2))],
    ids=["mindspore", "pipeline"],
)
def test_experts_over_tensor_parallel_ranks_are_refused_where_that_is_not_proved(strategy):
    (problem,) = [each for each in strategy_problems(strategy) if "mesh.ep" in each]
    assert "mesh.ep = 4 reaches beyond mesh.dp = 2" in problem and "possible: 1, 2" in problem


def test_a_layout_cuts_each_dim_by_the_product_of_its_axes():
    layout = (("dp", "tp"), (), ("tp",))
    assert degrees(layout, MESH) == (12, 1, 4)
    assert local_shape(layout, (24, 5, 8), MESH) == (2, 5, 2)
    assert show(layout) == "[dp*tp, ~, tp]"


def test_a_dim_that_cannot_be_cut_is_named():
    with pytest.raises(LayoutError, match=r"dim 1 of \(24, 6\) is not divisible by tp = 4"):
        local_shape(((), ("tp",)), (24, 6), MESH)


def pipeline(stages, pp=4, **settings):
    return Strategy(mesh=Mesh(pp=pp), pipeline=Pipeline(num_microbatches=8, stages=stages), **settings)


@pytest.mark.parametrize(
    ("num_layers", "stages", "counts"),
    [
        (8, "uniform", [2, 2, 2, 2]),
        (10, "uniform", [3, 3, 2, 2]),
        (4, "uniform", [1, 1, 1, 1]),
        (10, Stages(weights=[1.0, 2.0, 2.0, 1.0]), [2, 3, 3, 2]),
        (10, Stages(num_layers=[1, 4, 4, 1]), [1, 4, 4, 1]),
    ],
)
def test_layers_are_dealt_out_as_the_strategy_says(num_layers, stages, counts):
    strategy = pipeline(stages)
    assert layers_per_stage(num_layers, strategy) == counts
    assert stage_of_layers(num_layers, strategy) == [s for s, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize(
    ("recompute", "layers"),
    [
        (None, []),
        (Recompute(), [0, 1, 2, 3, 4, 5]),
        (Recompute(layers=[4, 1]), [1, 4]),
        (Recompute(per_stage=[2, 0, 1, 5]), [0, 1, 4, 5]),
    ],
)
def test_recompute_names_layers(recompute, layers):
    assert recomputed_layers(6, pipeline(Stages(num_layers=[3, 1, 1, 1]), recompute=recompute)) == layers


@pytest.mark.parametrize(
    ("stages", "num_layers", "expected"),
    [
        (Stages(num_layers=[2, 5]), 7, [2, 5]),
        (Stages(num_layers=[2, 5]), 14, [4, 10]),
        (Stages(num_layers=[3, 1]), 2, [1, 1]),
        (Stages(weights=[1, 3]), 8, [2, 6]),
        ("uniform", 5, [3, 2]),
    ],
)
def test_another_model_takes_numbers_of_layers_in_proportion(stages, num_layers, expected):
    strategy = Strategy(mesh=Mesh(pp=2), pipeline=Pipeline(num_microbatches=2, stages=stages))
    assert layers_per_part(num_layers, in_proportion(strategy)) == expected


def test_virtual_stages_are_dealt_out_in_turn():
    strategy = Strategy(mesh=Mesh(pp=2), pipeline=Pipeline(num_microbatches=2, virtual_stages=2))
    assert layers_of_stages(9, strategy) == [[0, 1, 2, 5, 6], [3, 4, 7, 8]]
    assert layers_per_part(9, strategy) == [3, 2, 2, 2] and layers_per_stage(9, strategy) == [5, 4]
    again = dataclasses.replace(strategy, recompute=Recompute(per_stage=[4, 1]))
    assert recomputed_layers(9, again) == [0, 1, 2, 3, 5]
    down_and_up = Pipeline(num_microbatches=4, virtual_stages=2, schedule="zero_bubble_v")
    assert stage_of_layers(5, dataclasses.replace(strategy, pipeline=down_and_up)) == [0, 0, 1, 1, 0]
    uneven = Pipeline(num_microbatches=2, virtual_stages=2, stages=Stages(num_layers=[1, 2, 3, 1]))
    assert stage_of_layers(7, dataclasses.replace(strategy, pipeline=uneven)) == [0, 1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("degrees", "uneven"),
    [
        ({"dp": 8, "tp": 3}, "dp 8 and tp 3"),
        ({"dp": 512, "tp": 12}, "tp 12"),
        ({"dp": 192, "tp": 8}, ""),  # CodeGeeX's run
        ({"dp": 3, "tp": 8}, ""),
        ({"dp": 6, "tp": 4}, ""),
        ({"pp": 3, "dp": 24}, ""),
        ({"dp": 3, "tp": 2}, "dp 3"),
    ],
)
def test_groups_that_mindspore_refuses_on_the_first_ascend(degrees, uneven):
    assert Mesh(**degrees).uneven_groups == uneven
