# SPDX-License-Identifier: Apache-2.0
"""The cost model on models with experts."""

import dataclasses

import pytest
from conftest import shared

from sporeloom.models.family import size_config
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.members import every
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parameters import expert_parameters, expert_shards, stage_parameters
from sporeloom.planner.published_experts import describe_experts, is_of_experts, read_expert_rows
from sporeloom.planner.rates import all_to_all
from sporeloom.planner.search import PlanRequest, search
from sporeloom.planner.step_time import step_time
from sporeloom.planner.validate import validate

RUNS = "facts/published_moe_runs.csv"


def pro_moe(**changes):
    return dataclasses.replace(of_decoder(size_config("pangu", "pro_moe_72b"), 4096), **changes)


def test_parameters_in_all_and_of_a_token_are_those_printed():
    dims = pro_moe()
    assert (dims.num_parameters, dims.active_parameters) == (71_988_781_056, 16_498_139_136)
    job = Parallelism(dp=16, ep=2, tp=8, pp=6)
    held = 8 * sum(stage_parameters(dims, job)) + 16 * sum(expert_parameters(dims, job))
    assert held == pytest.approx(dims.num_parameters, rel=0.01)


def test_optimizer_parallel_cuts_experts_over_those_that_hold_the_same():
    assert expert_shards(Parallelism(dp=16, ep=4, zero=1)) == 4
    assert expert_shards(Parallelism(dp=16, ep=16, zero=1)) == 1
    assert expert_shards(Parallelism(dp=16, tp=2, ep=4, expert_tp=1, zero=1)) == 8


def test_rows_that_leave_the_node_take_longest_and_are_sent_once_where_that_is_known():
    cluster = Cluster.of_chip("h100")
    near, far = (
        all_to_all(cluster, 1e9, every(cluster.units, 8, 1, 0)),
        all_to_all(cluster, 1e9, every(cluster.units, 32, 1, 0)),
    )
    assert far > 5 * near
    assert near < all_to_all(cluster, 1e9, every(cluster.units, 32, 1, 0), copies=8) < far
    assert all_to_all(cluster, 1e9, every(cluster.units, 1, 1, 0)) == 0


def test_pangu_pro_moe_gains_as_published_by_its_other_layout():
    """+35 % of MFU from TP1 EP8 CP8 PP6 VPP4, with fine-grained recomputation, to TP8 EP2 PP5 VPP5 without (arXiv:2505.21411
    table 2), on about 4000 devices and 4M tokens a step."""
    dims, cluster = pro_moe(expert_rows=1.0), Cluster.of_chip("ascend910b")
    common = {"zero": 1, "flash_attention": True, "sends_once": True}
    before = Parallelism(dp=80, cp=8, pp=6, ep=8, virtual_stages=4, num_microbatches=12, recompute="full", **common)
    after = Parallelism(
        dp=96, tp=8, pp=5, ep=2, virtual_stages=5, num_microbatches=10, sequence_parallel=True, **common
    )
    assert before.devices == after.devices and before.global_batch_size == after.global_batch_size
    gain = step_time(dims, before, cluster).total / step_time(dims, after, cluster).total
    assert gain > 1 and 1.35 / 1.5 <= gain <= 1.35 * 1.5


def test_the_published_runs_are_predicted():
    path = shared(RUNS)
    assert is_of_experts(path) and not is_of_experts(shared("facts/published_runs.csv"))
    report = validate(path)["step_time"]
    assert report["rows"] == len(read_expert_rows(path)) == 26
    assert report["median_abs_error"] <= 0.08
    row = read_expert_rows(path)[0]
    assert describe_experts({**row, "iter_s": "1"}) == describe_experts(row)


def test_the_search_shares_out_experts():
    request = PlanRequest(
        dims=pro_moe(expert_rows=1.5), cluster=Cluster.of_chip("ascend910b"), devices=64, global_batch_size=64
    )
    jobs = [option.job for option in search(request) if option.fits]
    assert {1, 2, 8} <= {job.ep for job in jobs}
    assert all(job.dp % job.ep == 0 and 64 % job.ep == 0 for job in jobs)
