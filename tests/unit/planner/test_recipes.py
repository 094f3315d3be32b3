# SPDX-License-Identifier: Apache-2.0
"""Settings of published runs: those of public recipes, and those that sources leave open."""

import dataclasses

import pytest
from conftest import shared

from sporeloom.planner.layer_time import attention_core, exposed_rows, layer_forward
from sporeloom.planner.members import every
from sporeloom.planner.open_settings import plausible, seconds_range
from sporeloom.planner.parts_time import head_passes
from sporeloom.planner.published import describe, read_rows
from sporeloom.planner.published_experts import describe_experts, read_expert_rows
from sporeloom.planner.rates import Rates, all_to_all
from sporeloom.planner.recipes import Recipe, recipes
from sporeloom.planner.step_time import step_time


@pytest.fixture(scope="module")
def runs():
    return {row["id"]: describe_experts(row) for row in read_expert_rows(shared("facts/published_moe_runs.csv"))}


def rates_of(run, **changes):
    job = dataclasses.replace(run.job, **changes)
    return job, Rates(run.dims, job, run.cluster)


def test_every_run_has_a_recipe_and_only_mindformers_leave_something_open(runs):
    dense = {row["id"] for row in read_rows(shared("facts/published_runs.csv"))}
    assert recipes().keys() - runs.keys() <= dense and runs.keys() <= recipes().keys()
    assert all(bool(run.assumed) == (run.cluster.chip == "ascend910b") for run in runs.values())


@pytest.mark.parametrize(
    ("name", "stages"),
    [  # of 61 layers; the last virtual stage has the rest, of parts of 4 or 8
        ("mb_deepseek_v3_26_08_gb300", (32, 29)),
        ("mb_deepseek_v3_26_08_gb200", (16, 16, 16, 13)),
        ("mb_deepseek_v3_26_04_01_b200", (8,) * 7 + (5,)),
        ("mb_deepseek_v3_26_06_b300", (8,) * 7 + (5,)),
        ("na_kimi_256", (8,) * 5 + (7,) * 3),
    ],
)
def test_stages_have_the_layers_of_the_recipe(runs, name, stages):
    assert runs[name].job.stages(61) == stages and sum(stages) == 61


def test_multi_token_prediction_is_a_layer_a_projection_and_a_head_of_the_last_stage(runs):
    run = runs["mb_deepseek_v3_26_08_gb200"]
    assert run.dims.mtp_layers == 1 and runs["mb_deepseek_v3_no_mtp_25_11_gb200"].dims.mtp_layers == 0
    job, rates = rates_of(run)
    with_depth, without = (
        head_passes(dataclasses.replace(run.dims, mtp_layers=depths), job, rates)[0] for depths in (1, 0)
    )
    layer = layer_forward(run.dims.mtp, job, rates)
    projection = rates.matmul(job.tokens(4096), 7168, 2 * 7168)
    assert with_depth.matmul == pytest.approx(2 * without.matmul + layer.matmul + projection)


def test_all_to_alls_are_hidden_where_engines_compute_another_microbatch_meanwhile(runs):
    run = runs["mb_deepseek_v3_26_04_01_b200"]
    (job, rates), (waiting, _) = rates_of(run), rates_of(run, overlaps_experts=False)
    layer = dataclasses.replace(layer_forward(run.dims, waiting, rates), expert_parallel=1.0)
    hidden = 1.5 * rates.experts.overlap * (layer.matmul + layer.attention + layer.memory)
    assert exposed_rows(layer, waiting, rates) == 1.0
    assert exposed_rows(layer, job, rates) == pytest.approx(1 - hidden)


def test_captured_launches_cost_nothing(runs):
    run = runs["mb_qwen3_30b_a3b_26_08_gb300"]
    found = {
        kind: layer_forward(run.dims, *rates_of(run, captured=kind)).overhead for kind in ("none", "attention", "all")
    }
    fitted = run.cluster.fitted_experts.layer_overhead_us * 1e-6
    assert found["all"] == 0 and found["attention"] == pytest.approx(fitted)
    assert found["none"] == pytest.approx(fitted + run.cluster.fitted.layer_overhead_us * 1e-6)


def test_selective_recomputation_repeats_what_the_recipe_names(runs):
    run, width = runs["mb_deepseek_v3_no_mtp_25_11_gb200"], 2
    up = 128 * (1536 * 192 + 512 * 256)  # queries and keys and values of latents
    assert (run.job.recompute, run.job.repeated_entries, run.job.repeated_features) == ("selective", up, 0)
    job, rates = rates_of(run)
    assert attention_core(run.dims, job, rates) == pytest.approx(2 * 4096 * up / rates.flops)
    job, rates = rates_of(runs["mb_gpt_oss_120b_26_04_01_b200"])
    passes = 4 * 4096 * width * (4 * 2880 + 3 * 4 * 2880)  # microbatches of 4
    assert attention_core(runs["mb_gpt_oss_120b_26_04_01_b200"].dims, job, rates) == pytest.approx(passes / rates.bytes)
    assert runs["na_kimi_256"].job.recompute == "full" and runs["mb_qwen3_30b_a3b_26_08_gb300"].job.recompute == "none"


def test_libraries_send_a_token_to_a_rank_once(runs):
    cluster, k, ranks = runs["na_qwen3_30b_8"].cluster, 8, 8
    once = ranks * (1 - (1 - 1 / ranks) ** k) / k
    groups = every(cluster.units, ranks, 1, ranks)
    fast, slow = (all_to_all(cluster, 1e12, groups, copies) for copies in (k, 0))
    assert fast / slow == pytest.approx(once, rel=1e-3)


def test_what_a_source_leaves_open_is_a_range(runs):
    """The rules' own choice is one of those, and a run of which all is known has one time."""
    open_run, known = runs["mf_deepseek2"], runs["na_kimi_256"]
    low, high = seconds_range(open_run)
    assert low < step_time(open_run.dims, open_run.job, open_run.cluster).total <= high
    assert seconds_range(known) == (step_time(known.dims, known.job, known.cluster).total,) * 2
    kinds = {(job.recompute, job.zero, job.sends_once, job.overlaps_experts) for job in plausible(open_run)}
    assert kinds == {("full", 3, library, overlap) for library in (False, True) for overlap in (False, True)}


def test_open_microbatches_keep_the_batch():
    rows = {row["id"]: row for row in read_rows(shared("facts/published_runs.csv"))}
    run = describe(rows["mcore_h100_70b"])
    assert "microbatch" in run.assumed
    assert {job.global_batch_size for job in plausible(run)} == {run.job.global_batch_size}
    assert len({job.microbatch for job in plausible(run)}) > 1


def test_settings_of_mindformers_are_those_of_its_files(runs):
    run, other = runs["mf_deepseek2"], runs["mf_qwen2_57b"]
    assert (run.dims.expert_rows, run.job.flash_attention, run.job.sequence_parallel) == (2.0, False, False)
    assert (other.dims.expert_rows, other.job.flash_attention, other.job.sequence_parallel) == (1.1, True, True)
    states = [(one.job.weight_bytes, one.job.gradient_bytes, one.job.optimizer_bytes) for one in (run, other)]
    assert states == [(2, 2, 8), (2, 4, 12)]


def test_an_unknown_recipe_is_the_default(runs):
    assert Recipe().layers_of_stages(61, 4, 4) is None
    assert Recipe(fills_parts=True).layers_of_stages(8, 2, 2) == (4, 4)
