# SPDX-License-Identifier: Apache-2.0
"""A scaled-down strategy keeps every axis, option and rule."""

import dataclasses

import pytest
from conftest import CONFIGS
from strategy_names import family_and_size

from sporeloom.certification.shrink import BATCH, SEQ_LEN, small_meshes, small_model, small_strategies
from sporeloom.core.errors import ConfigError
from sporeloom.models.family import size_config
from sporeloom.strategy.checks import batch_problems, model_problems, strategy_problems
from sporeloom.strategy.config import Offload, OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh

SHIPPED = sorted(path for path in CONFIGS.glob("*.yaml") if load_strategy(path).engine != "mindspore")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("processes", [4, 8])
def test_every_built_in_strategy_is_scaled_down(path, processes):
    strategy = load_strategy(path)
    family, size = family_and_size(path.stem)
    model = size_config(family, size)
    small, small_config = (
        small_strategies(strategy, model.num_layers, processes),
        small_model(model, strategy, processes),
    )
    axes = {axis for axis in strategy.mesh.order if strategy.mesh.degree(axis) > 1}
    assert {axis for one in small for axis in one.mesh.order if one.mesh.degree(axis) > 1} == axes
    for one in small:
        assert one.mesh.size <= processes
        assert one.rules == strategy.rules
        assert one.sequence_parallel == (strategy.sequence_parallel and one.mesh.tp > 1)
        problems = strategy_problems(one) + model_problems(one, small_config)
        assert problems + batch_problems(one, BATCH, SEQ_LEN) == []
    assert any(one.optimizer_parallel for one in small) == bool(strategy.optimizer_parallel)
    assert any(one.recompute for one in small) == bool(strategy.recompute)
    same = {"dropout_rate": model.dropout_rate, "final_norm": model.final_norm, "activation": model.activation}
    assert {name: getattr(small_config, name) for name in same} == same


def test_of_three_axes_four_processes_prove_every_pair_and_eight_all():
    mesh = Mesh(pp=16, dp=16, tp=8)
    pairs = [set(one.sharding_axes) | ({"pp"} if one.pp > 1 else set()) for one in small_meshes(mesh, 4)]
    assert pairs == [{"pp", "dp"}, {"pp", "tp"}, {"dp", "tp"}]
    assert small_meshes(mesh, 8) == [Mesh(pp=2, dp=2, tp=2)]
    assert small_meshes(Mesh(tp=8), 4) == [Mesh(tp=4)]
    assert small_meshes(Mesh(dp=2, tp=8), 8) == [Mesh(dp=2, tp=4)]
    assert small_meshes(Mesh(tp=2, dp=4), 4)[0].order[:2] == ("tp", "dp")


def test_what_is_unequal_stays_so():
    strategy = Strategy(
        mesh=Mesh(pp=4, dp=2),
        pipeline=Pipeline(num_microbatches=16, stages=Stages(num_layers=[5, 6, 6, 7])),
        recompute=Recompute(kind="selective", per_stage=[2, 2, 2, 2]),
    )
    (small,) = small_strategies(strategy, 24, 4)
    assert small.mesh == Mesh(pp=2, dp=2)
    assert small.pipeline == Pipeline(num_microbatches=4, stages=Stages(num_layers=[1, 2]))
    assert small.recompute == Recompute(kind="selective", layers=[0])
    assert small_model(size_config("pangu", "2.6b"), strategy, 4).num_layers == 3


def test_groups_of_replicas_get_a_mesh_of_their_own():
    zero = OptimizerParallel(shard_size=8, threshold_kb=64)
    strategy = Strategy(mesh=Mesh(dp=64, tp=8), optimizer_parallel=zero)
    small = small_strategies(strategy, 32, 4)
    assert [one.mesh for one in small] == [Mesh(dp=2, tp=2), Mesh(dp=4)]
    assert [one.optimizer_parallel.shard_size for one in small] == [None, 2]
    assert all(one.optimizer_parallel.threshold_kb == 1 for one in small)
    whole = dataclasses.replace(strategy, optimizer_parallel=dataclasses.replace(zero, shard_size=None))
    assert [one.mesh for one in small_strategies(whole, 32, 4)] == [Mesh(dp=2, tp=2)]


def test_virtual_stages_and_moments_on_the_host_stay():
    pipeline = Pipeline(num_microbatches=32, virtual_stages=5, schedule="gpipe")
    large = Strategy(mesh=Mesh(pp=8, tp=8), pipeline=pipeline, offload=Offload(optimizer=True))
    (small,) = small_strategies(large, num_layers=80, processes=4)
    assert (small.pipeline.virtual_stages, small.pipeline.schedule) == (2, "gpipe")
    assert small.offload == Offload(optimizer=True)
    model = small_model(size_config("pangu", "13b"), large, 4)
    assert model.num_layers == 4 and model_problems(small, model) == []


def test_several_domains_stay_so():
    model = size_config("pangu", "sigma_1t")
    strategy = Strategy(mesh=Mesh(dp=8, ep=4))
    for domains, wanted in ((1, 1), (5, 2)):
        experts = dataclasses.replace(model.mixture, num_domains=domains, domain=domains - 1)
        small = small_model(dataclasses.replace(model, experts=experts), strategy, 4)
        assert (small.num_domains, small.mixture.domain) == (wanted, wanted - 1)
        assert small.mixture.router == "hash"


def test_experts_over_tensor_parallel_ranks_stay_on_one_mesh():
    (small,) = small_strategies(Strategy(mesh=Mesh(dp=2, ep=4, tp=2)), 4, 4)
    assert small.mesh == Mesh(dp=2, ep=2, tp=2)


def test_graphs_of_mindspores_partitioner_are_not_proved():
    with pytest.raises(ConfigError, match=r"engine: mindspore lets MindSpore partition, .* neither counted nor proved"):
        small_strategies(Strategy(mesh=Mesh(dp=2), engine="mindspore"), 4, 4)
