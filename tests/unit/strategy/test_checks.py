# SPDX-License-Identifier: Apache-2.0
import dataclasses

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.experts import ExpertConfig
from sporeloom.strategy.checks import (
    adapter_problems,
    batch_problems,
    group_problems,
    launch_problems,
    model_problems,
    strategy_problems,
)
from sporeloom.strategy.config import OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from sporeloom.strategy.mesh import Mesh

MODEL = ModelConfig(vocab_size=40, hidden_size=24, num_layers=4, num_heads=12)


def strategy(pp=1, dp=1, tp=1, **settings):
    return Strategy(mesh=Mesh(pp=pp, dp=dp, tp=tp), source="s.yaml", lines={"mesh": 1}, **settings)


def test_a_mesh_of_another_size_than_the_job_names_both():
    (problem,) = launch_problems(strategy(dp=2, tp=2), 8)
    assert "pp 1 x dp 2 x tp 2 = 4 processes, but 8 processes were launched" in problem
    assert "--worker_num=4" in problem


def test_a_dimension_tp_does_not_divide_comes_with_the_nearest_degrees_that_do():
    problems = model_problems(strategy(tp=5), MODEL)
    assert "s.yaml:1: mesh.tp = 5 does not divide num_heads = 12; nearest that do: 4 and 6" in problems
    assert any("ffn_hidden_size = 96; nearest that do: 4 and 6" in p for p in problems)
    assert not any("vocab_size" in p for p in problems)
    (problem,) = model_problems(strategy(tp=4), dataclasses.replace(MODEL, vocab_size=250))
    assert problem.endswith("nearest that do: 2 and 5; or give the model rows that no token uses: vocab_size 252")


def test_mindspore_reshards_after_forward_for_some_jobs_and_our_own_graphs_for_all():
    zero = OptimizerParallel(reshard_after_forward=True)
    experts = dataclasses.replace(MODEL, experts=ExpertConfig(num_experts=4, experts_per_token=2))
    ours = strategy(dp=2, optimizer_parallel=zero)
    assert strategy_problems(ours) + model_problems(ours, experts) + batch_problems(ours, 8, 64, accumulate=2) == []
    assert adapter_problems(ours) == [] and ours.device_problems() == []
    theirs = dataclasses.replace(ours, engine="mindspore", recompute=Recompute())
    assert strategy_problems(theirs) + model_problems(theirs, MODEL) + batch_problems(theirs, 8, 64) == []
    for (problem,), told in (
        (batch_problems(theirs, 8, 64, accumulate=2), "takes one microbatch a step with it, not 2"),
        (model_problems(theirs, experts), "does not implement it for models with experts"),
        (adapter_problems(theirs), "does not implement it for adapters (LoRA)"),
    ):
        assert f"reshard_after_forward: MindSpore {told}; remove `engine: mindspore`" in problem


def test_a_number_of_devices_that_mindspore_does_not_take():
    (problem,) = strategy_problems(strategy(dp=3, tp=2))
    assert "pp 1 x dp 3 x tp 2 = 6 processes; MindSpore takes 1, 2, 4 or a multiple of 8" in problem
    assert all(strategy_problems(strategy(dp=dp)) == [] for dp in (1, 2, 4, 8, 24))


def test_more_stages_than_layers():
    (problem,) = model_problems(strategy(pp=5, pipeline=Pipeline(num_microbatches=5)), MODEL)
    assert "mesh.pp = 5 stages are more than the 4 layers" in problem


def test_stage_sizes_must_add_up_to_the_layers():
    (problem,) = model_problems(
        strategy(pp=2, pipeline=Pipeline(num_microbatches=2, stages=Stages(num_layers=[2, 3]))), MODEL
    )
    assert "adds up to 5, but the model has 4 layers" in problem


def test_a_recomputed_layer_must_exist():
    (problem,) = model_problems(strategy(recompute=Recompute(layers=[1, 4])), MODEL)
    assert "layer 4 does not exist; the last is 3" in problem


def test_a_batch_that_cannot_be_cut_comes_with_the_nearest_that_can():
    (problem,) = batch_problems(strategy(pp=2, dp=2, pipeline=Pipeline(num_microbatches=4)), 12, 64)
    assert "a batch of 12 sequences is not divisible by dp 2 x 4 microbatches = 8; use 8 or 16" in problem


def test_a_pipeline_does_not_accumulate_twice():
    (problem,) = batch_problems(strategy(pp=2, pipeline=Pipeline(num_microbatches=2)), 8, 64, accumulate=2)
    assert "raise that instead" in problem


def test_what_fits_has_no_problem():
    fitting = strategy(pp=2, dp=2, tp=2, pipeline=Pipeline(num_microbatches=4))
    assert launch_problems(fitting, 8) + model_problems(fitting, MODEL) + batch_problems(fitting, 16, 64) == []


def test_experts_must_be_there_and_be_divided():
    shared = Strategy(mesh=Mesh(dp=4, ep=4), source="s.yaml", lines={"mesh": 1})
    (problem,) = model_problems(shared, MODEL)
    assert problem == "s.yaml:1: mesh.ep = 4, but the model has no experts; leave it out"
    six = dataclasses.replace(MODEL, experts=ExpertConfig(num_experts=6, experts_per_token=2))
    (problem,) = model_problems(shared, six)
    assert "mesh.ep = 4 does not divide experts.num_experts = 6; nearest that do: 3 and 6" in problem
    narrow = dataclasses.replace(six, experts=dataclasses.replace(six.experts, ffn_hidden_size=9))
    (problem,) = model_problems(strategy(tp=2), narrow)
    assert "mesh.tp = 2 does not divide experts.ffn_hidden_size = 9" in problem


def test_groups_in_which_capacity_is_counted_lie_within_a_rank():
    grouped = ExpertConfig(num_experts=4, experts_per_token=2, capacity_factor=1.0, capacity_group=96)
    model = dataclasses.replace(MODEL, experts=grouped)
    assert group_problems(strategy(dp=2), model, 12, 32) == []
    (problem,) = group_problems(strategy(dp=4), model, 16, 32)
    assert "experts.capacity_group = 96 tokens do not divide the 128 that a rank has of a microbatch" in problem
    sequences = dataclasses.replace(MODEL, experts=dataclasses.replace(grouped, capacity_group=None))
    assert group_problems(Strategy(mesh=Mesh(dp=2, cp=2)), sequences, 4, 32) == []
    (problem,) = group_problems(Strategy(mesh=Mesh(dp=4, cp=2)), sequences, 4, 32)
    assert "groups of 32 tokens, which do not divide the 16 that a rank has" in problem
    assert "write experts.capacity_group 16" in problem
    halves = dataclasses.replace(MODEL, experts=dataclasses.replace(grouped, capacity_group=16))
    assert group_problems(Strategy(mesh=Mesh(dp=4, cp=2)), halves, 4, 32) == []
