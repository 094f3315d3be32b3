# SPDX-License-Identifier: Apache-2.0
"""The search finds optima that are planted in the cluster or the model, in closed form."""

import dataclasses

import pytest
from tuned import tune_request

from sporeloom.planner.closed_forms import job_of
from sporeloom.planner.search import evaluate
from sporeloom.strategy.config import Stages
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy_search import scoring
from sporeloom.strategy_search.candidates import candidates, meshes, problems, uneven_stages
from sporeloom.strategy_search.scoring import score


def seconds_of(request, candidate):
    job = job_of(candidate.strategy, request.model.values, request.batch_size, candidate.accumulate)
    return evaluate(request.dims, job, request.plan.cluster).seconds


def on_mesh(monkeypatch, request, **degrees):
    """Search this mesh alone."""
    wanted = {axis: degrees.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
    found = [job for job in meshes(request, 1000) if all(getattr(job, axis) == n for axis, n in wanted.items())]
    microbatch = degrees.get("microbatch")
    chosen = [job for job in found if microbatch in (None, job.microbatch)]
    assert chosen
    monkeypatch.setattr(scoring, "meshes", lambda *_: chosen)


def test_slow_links_between_servers_keep_tensor_parallelism_inside_one(tmp_path):
    slow = tune_request(tmp_path, batch=2, cluster={"inter_node_gb_per_s": 1, "memory_gb": 32})
    best = score(slow, 100).fitting[0].candidate.strategy
    assert best.mesh.tp <= 4
    tp8 = [one for one in score(slow, 100).fitting if one.candidate.strategy.mesh.tp == 8]
    assert tp8 and tp8[0].seconds > 1.5 * score(slow, 100).fitting[0].seconds
    fast = tune_request(
        tmp_path, batch=1, cluster={"inter_node_gb_per_s": 400, "intra_node_gb_per_s": 400, "devices_per_node": 8}
    )
    assert score(fast, 100).fitting[0].candidate.strategy.mesh.tp == 8


def test_little_memory_forces_sharding_then_recomputation(tmp_path, monkeypatch):
    def best(memory_gb):
        request = tune_request(tmp_path, cluster={"memory_gb": memory_gb})
        on_mesh(monkeypatch, request, dp=8, microbatch=2)
        return score(request, 100)

    enough = best(256).fitting[0].candidate.strategy
    assert enough.recompute is None and enough.offload is None
    sharded = best(40).fitting[0].candidate.strategy
    assert sharded.optimizer_parallel
    smallest = best(14)
    chosen = smallest.fitting[0].candidate.strategy
    assert chosen.recompute and chosen.optimizer_parallel
    assert all(one.peak_bytes <= (14 - 0.1) * 2**30 for one in smallest.fitting)
    assert smallest.nearest is not None and smallest.nearest.peak_bytes > (14 - 0.1) * 2**30


def test_the_fewest_layers_that_fit_are_recomputed(tmp_path, monkeypatch):
    request = tune_request(tmp_path, cluster={"memory_gb": 24})
    on_mesh(monkeypatch, request, dp=8, microbatch=2)
    partly = {}
    for one in score(request, 100).fitting:
        if (recompute := one.candidate.strategy.recompute) and recompute.per_stage:
            key = one.name.rpartition("compute")[0], one.candidate.strategy.offload is None
            partly.setdefault(key, {})[recompute.per_stage[0]] = one
    assert partly
    for counts in partly.values():  # the fewest, and the fewest with a margin
        assert len(counts) <= 2 and min(counts) > 0 and max(counts) < request.model.values.num_layers
        one = counts[min(counts)]
        strategy = one.candidate.strategy
        fewer = dataclasses.replace(strategy.recompute, per_stage=[min(counts) - 1])
        job = job_of(dataclasses.replace(strategy, recompute=fewer), request.model.values, 16, one.candidate.accumulate)
        limit = request.plan.cluster.usable_bytes * (1.0 if len(counts) == 2 else 0.9)
        assert evaluate(request.dims, job, request.plan.cluster).peak_bytes > limit, one.name


def test_the_host_is_used_where_nothing_else_fits(tmp_path, monkeypatch):
    request = tune_request(tmp_path, cluster={"memory_gb": 256})
    on_mesh(monkeypatch, request, dp=8, microbatch=2)
    fitting = score(request, 100).fitting
    least = min(one.peak_bytes for one in fitting if not one.candidate.strategy.offload) / 2**30
    small = tune_request(tmp_path, cluster={"memory_gb": least})  # of which 0.1 GB are reserved
    found = score(small, 100).fitting
    assert found and all(one.candidate.strategy.optimizer_on_host for one in found)


@pytest.mark.parametrize(("num_layers", "pp"), [(6, 4), (10, 4), (5, 2)])
def test_uneven_stages_win_where_layers_do_not_divide_and_the_head_is_heavy(
    tmp_path, monkeypatch, write, num_layers, pp
):
    request = tune_request(tmp_path, devices=pp, batch=16, compute_dtype="float16")
    deep = dataclasses.replace(request.model.values.with_layers(num_layers), vocab_size=160_000)
    dims = dataclasses.replace(request.plan.dims, num_layers=num_layers, vocab_size=160_000)
    request = dataclasses.replace(
        request,
        model=dataclasses.replace(request.model, values=deep),
        plan=dataclasses.replace(request.plan, dims=dims),
    )
    on_mesh(monkeypatch, request, pp=pp, microbatch=1)
    scores = score(request, 100)
    one_f_one_b = [one for one in scores.fitting if one.candidate.strategy.pipeline.schedule == "1f1b"]
    best = next(one for one in one_f_one_b if one.candidate.strategy.pipeline.virtual_stages == 1)
    stages = best.candidate.strategy.pipeline.stages
    assert isinstance(stages, Stages) and sum(stages.num_layers) == num_layers
    assert stages.num_layers[-1] == min(stages.num_layers) < max(stages.num_layers)
    even = next(
        one
        for one in one_f_one_b
        if one.candidate.strategy.pipeline.stages == "uniform" and one.candidate.strategy.pipeline.virtual_stages == 1
    )
    assert best.seconds < even.seconds


def test_zero_bubbles_win_in_a_pipeline_of_few_microbatches(tmp_path, monkeypatch):
    request = tune_request(tmp_path, devices=8, batch=16)
    on_mesh(monkeypatch, request, pp=4, tp=2, microbatch=2)
    by_schedule = {}
    for one in score(request, 100).fitting:
        by_schedule.setdefault(one.candidate.strategy.pipeline.schedule, one)
    assert {"1f1b", "gpipe", "zero_bubble_h1", "zero_bubble_v", "dualpipe_v"} <= by_schedule.keys()
    assert next(iter(by_schedule)).startswith(("zero_bubble", "dualpipe"))


def test_context_parallel_candidates_have_both_kinds(tmp_path, monkeypatch):
    request = tune_request(tmp_path, size="embedded_1b", batch=8, seq_len=8192)
    job = next(job for job in meshes(request, 1000) if job.cp == 2 and job.tp == 1)
    assert {one.strategy.context_parallel for one in candidates(request, job)} == {"gather", "ulysses"}


def test_experts_are_sharded_over_a_part_of_tensor_parallelism(tmp_path):
    request = tune_request(tmp_path, size="pro_moe_tiny", batch=16)
    found = {(job.mesh.dp, job.mesh.tp, job.mesh.ep) for job in meshes(request, 1000)}
    assert any(ep > dp for dp, tp, ep in found)
    job = next(job for job in meshes(request, 1000) if job.ep > job.dp)
    assert list(candidates(request, job))


def test_every_candidate_is_legal_and_its_file_says_the_same(tmp_path):
    request = tune_request(tmp_path, size="tiny", devices=4, batch=8)
    found = score(request, 100).fitting
    assert len({one.name for one in found}) == len(found) > 500
    for one in found[::25]:
        path = tmp_path / "one.yaml"
        path.write_text(one.candidate.text(request.model.values))
        loaded = load_strategy(path)
        assert not problems(request, dataclasses.replace(one.candidate, strategy=loaded))
        expected = dataclasses.replace(one.candidate.strategy, rules=loaded.rules)
        assert loaded == expected, one.name
        assert seconds_of(request, dataclasses.replace(one.candidate, strategy=loaded)) == one.seconds


def test_uneven_stages_keep_all_layers():
    for num_layers, pp in ((2, 2), (5, 2), (6, 4), (40, 8), (4, 4)):
        for counts in uneven_stages(num_layers, pp):
            assert sum(counts) == num_layers and len(counts) == pp and min(counts) >= 1
