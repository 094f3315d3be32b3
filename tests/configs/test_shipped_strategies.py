# SPDX-License-Identifier: Apache-2.0
"""Every built-in strategy is partitioned as its rules say, and communicates what it implies."""

import dataclasses
import json

import pytest
from conftest import CONFIGS, call
from strategy_names import family_and_size

from sporeloom.models.family import size_config
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.loader import load_strategy

FILES = sorted(CONFIGS.glob("*.yaml"))
NAMES = [path.stem for path in FILES]
WITH_EXPERTS = [path.stem for path in FILES if load_strategy(path).mesh.ep > 1]
DROPLESS = [name for name in WITH_EXPERTS if size_config(*family_and_size(name)).mixture.capacity_factor is None]

pytestmark = pytest.mark.timeout(1000)
WORKER = "tests/configs/shipped_worker.py"
MORE = {
    # A tied table of a pipeline under ZeRO is sharded like all others, and gathered and added up on both stages. The closed
    # formulas leave it whole on each rank. In these reduced models tables are large. All fractions are measured.
    "pangu_13b_dp4_tp8_pp2": 0.09,
    "pangu_200b_dp16_tp8_pp16": 0.10,
    "pangu_ultra_135b_dp128_tp8_pp8": 0.10,
}
"""Bytes that a reduced strategy sends beyond the closed formulas of MindSpore's partitioner, as a fraction."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_name_says_family_size_and_degrees(path):
    family, size = family_and_size(path.stem)
    parts = path.stem.removeprefix(f"{family}_{size}_").split("_")
    mesh = load_strategy(path).mesh
    degrees = [f"{axis}{mesh.degree(axis)}" for axis in ("dp", "ep", "cp", "tp", "pp") if mesh.degree(axis) > 1]
    if mesh.ep == mesh.dp > 1:
        degrees.remove(f"dp{mesh.dp}")
    assert parts[: len(degrees)] == degrees
    beside = path.with_suffix(".json")  # what the strategy wants otherwise of the model
    changes = json.loads(beside.read_text()) if beside.exists() else {}
    assert model_problems(load_strategy(path), dataclasses.replace(size_config(family, size), **changes)) == []
    if changes:
        assert model_problems(load_strategy(path), size_config(family, size)) != []


@pytest.fixture(scope="session")
def partitioned():
    """strategy name -> what a rank of each stage holds and sends."""
    longest_first = sorted(FILES, key=lambda path: -load_strategy(path).mesh.pp)
    shares = call(WORKER, "share_of_reports", list(map(str, longest_first)), processes=2, timeout=900, fresh=True)
    return {name: reports for share in shares for name, reports in share.items()}


def count(report, kinds, phase=None, size=None):
    return sum(
        times
        for kind, when, _, times, num_bytes in report["counts"]
        if kind in kinds and phase in (None, when) and size in (None, num_bytes)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_stage_holds_what_the_rules_say_and_sends_no_more_than_implied(partitioned, name):
    """A dry run raises where a shard is not the one of the rules; here the sums are compared with the closed formulas."""
    strategy = load_strategy(CONFIGS / f"{name}.yaml")
    zero, pp = strategy.optimizer_parallel is not None, strategy.mesh.pp > 1
    for report in partitioned[name]:
        held, implied = report["parameter_bytes"], report["implied_parameter_bytes"]
        fewer = report["tied_bytes"] if zero and pp else 0  # on two stages: ours shards it
        more = report["short_bytes"] if zero else 0  # parameters of fewer rows than ranks hold them, in reduced models
        assert implied - fewer <= held <= implied + more
        assert report["optimizer_bytes"] == 2 * held
        assert report["sent"] <= (1 + MORE.get(name, 0)) * report["implied"] + 64, report["sent"] / report["implied"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_costs_two_forward_reductions_under_tensor_parallel(partitioned, name):
    """PaLM's, whose attention and MLP are added up first, one; and the embedding one; experts that compute their own rows one
    more for the sums of tokens, unless these are scattered. Recomputing a layer repeats the attention's alone."""
    strategy = load_strategy(CONFIGS / f"{name}.yaml")
    reductions = ("AllReduce", "ReduceScatter")
    for report in partitioned[name]:
        size, parts = report["activation_bytes"], report["microbatches"]
        of_experts = name in DROPLESS and not strategy.sequence_parallel
        in_a_layer = 1 if name.startswith("palm") else 3 if of_experts else 2
        expected = (in_a_layer * report["layers"] + (report["stage"] == 0)) * parts if strategy.mesh.tp > 1 else 0
        assert count(report, reductions, "forward", size) == expected
        assert count(report, reductions, "recompute", size) in (0, report["layers"] * parts)
        assert (count(report, ("ReduceScatter",), "forward", size) > 0) == strategy.sequence_parallel
        if strategy.mesh.cp > 1 and strategy.context_parallel == "ulysses":
            assert count(report, ("AlltoAll",), "forward") == 4 * report["layers"]
            assert count(report, ("AlltoAll",), "backward") == 4 * report["layers"]
        elif strategy.mesh.ep == 1:
            assert count(report, ("AlltoAll",)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPLESS)
def test_experts_of_their_own_rows_gather_tokens_and_scatter_sums(partitioned, name):
    """Once a layer and microbatch each way; between ranks go numbers of rows besides."""
    for report in partitioned[name]:
        each, tokens = report["layers"] * report["microbatches"], 2 * report["activation_bytes"]  # ep is 2
        assert count(report, ("AllGather",), "forward", tokens) >= each  # ZeRO gathers weights, some as large
        assert count(report, ("ReduceScatter",), "forward", tokens) == each
        assert count(report, ("ReduceScatter",), "backward", tokens) == each
        assert count(report, ("AlltoAll",), "forward") == each
        assert count(report, ("AlltoAll",), "backward") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WITH_EXPERTS if name not in DROPLESS])
def test_a_layer_of_experts_costs_two_all_to_alls(partitioned, name):
    for report in partitioned[name]:
        forward = count(report, ("AlltoAll",), "forward")
        assert 0 < forward <= 2 * report["layers"] * report["microbatches"]
        assert count(report, ("AlltoAll",), "backward") == forward
        assert count(report, ("AlltoAll",), "recompute") in (0, forward)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "pp" in name and name not in WITH_EXPERTS])
def test_a_pipeline_sends_each_microbatch_forward_and_its_gradient_back(partitioned, name):
    first, *_, last = partitioned[name]
    for report in (first, last):
        sent = report["microbatches"] * (2 * report["virtual_stages"] - 1)
        assert count(report, ("Send",)) == count(report, ("Receive",)) == sent
