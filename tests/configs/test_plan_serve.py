# SPDX-License-Identifier: Apache-2.0
"""Plans of servers: what they add up, what moves them, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import call, tool

from sporeloom.core.errors import ConfigError
from sporeloom.inference.cache import cache_bytes
from sporeloom.models.family import size_config
from sporeloom.models.slots import num_slots_for
from sporeloom.planner.cluster import read_cluster
from sporeloom.planner.errors import NoInterval
from sporeloom.serve.plan import ServingLoad, ServingPlan, load_problems, reduced_depths
from sporeloom.serve.plan_command import as_dict, main, report, start
from sporeloom.serve.plan_errors import FIGURES, serving_intervals

SMALL = {"num_rows": 4, "input_len": 100, "output_len": 20, "chunk": 64}
MODEL = dataclasses.replace(size_config("pangu", "tiny"), compute_dtype="bfloat16", dropout_rate=0.0)


def plan(size="tiny", tp=1, **load):
    return call("tests/configs/serving_plan_worker.py", "plan", size, tp, {**SMALL, **load})


def plan_long(**load):
    """The same of a model with contexts of 512 tokens."""
    return call("tests/configs/serving_plan_worker.py", "plan", "embedded_tiny", 1, {**SMALL, **load}, 512)


@pytest.fixture(scope="module")
def alone():
    return plan()


@pytest.mark.slow
def test_a_plan_adds_up(alone):
    assert sum(alone["decode_parts"].values()) == pytest.approx(alone["decode_s"])
    assert alone["cache_bytes"] == cache_bytes(MODEL, 4, num_slots_for(120))
    assert alone["peak_bytes"] > alone["weight_bytes"] + alone["cache_bytes"]
    parts = [plan(input_len=length, output_len=120 - length)["first_token_s"] for length in (64, 37, 101)]
    assert alone["first_token_s"] == pytest.approx(parts[0] + parts[1])  # 64 tokens, and 36 that are computed as 64
    assert parts[1] == pytest.approx(parts[0]) and parts[2] == pytest.approx(2 * parts[0])
    seconds = alone["first_token_s"] + 19 * alone["decode_s"] / 4
    assert alone["request_s"] == pytest.approx(seconds) and alone["tokens_per_s"] == pytest.approx(20 / seconds)


@pytest.mark.slow
def test_a_deep_model_is_planned_from_few_layers():
    load = {**SMALL, "input_len": 16, "weights": "w8a8"}
    found, of_all = call("tests/configs/serving_plan_worker.py", "by_depth_and_of_all", "tiny", 2, load, 4)
    for name in ("load", "intervals", "intervals_meaning"):
        assert found.pop(name) == of_all.pop(name)
    assert found.pop("decode_parts") == pytest.approx(of_all.pop("decode_parts"), rel=1e-9)
    assert found == pytest.approx(of_all, rel=1e-9)


@pytest.mark.parametrize(
    ("family", "size", "depths"),
    [
        ("pangu", "2.6b", [3, 4]),
        ("pangu", "embedded_7b", [2, 3]),
        ("pangu", "pro_moe_72b", None),
        ("pangu", "tiny", None),
    ],
)
def test_depths_have_two_layers_of_the_last_kind_and_one_more(family, size, depths):
    model = size_config(family, size).without_mtp()
    assert [each.num_layers for each in reduced_depths(model)] == (depths or [model.num_layers])


@pytest.mark.slow
def test_devices_share_weights_cache_and_work(alone):
    both = plan(tp=2)
    assert both["cache_bytes"] == alone["cache_bytes"] / 2
    assert alone["weight_bytes"] / 2 < both["weight_bytes"] < 0.6 * alone["weight_bytes"]  # norms are whole
    assert "AllReduce" in both["decode_parts"] and "AllReduce" not in alone["decode_parts"]


@pytest.mark.slow
def test_sequences_chunks_and_number_types_move_what_they_should(alone):
    many, quantized, at_once = plan(num_rows=16), plan(weights="int8", kv_cache="int8"), plan(chunk=100)
    assert many["tokens_per_s"] > alone["tokens_per_s"] and many["decode_s"] > alone["decode_s"]
    assert quantized["weight_bytes"] < 0.45 * alone["weight_bytes"]  # which holds matrices in bfloat16
    assert plan(weights="w8a8", kv_cache="int8")["weight_bytes"] == quantized["weight_bytes"]
    assert quantized["cache_bytes"] < 0.8 * alone["cache_bytes"]
    assert at_once["first_token_s"] < alone["first_token_s"]


@pytest.mark.slow
def test_a_mean_context_shortens_steps_and_leaves_the_memory():
    full, mean = plan_long(output_len=300), plan_long(output_len=300, mean_context=250)
    assert all(mean[name] == full[name] for name in ("weight_bytes", "cache_bytes", "peak_bytes"))
    as_short = plan_long(output_len=150)  # whose cache has as many slots as the mean context needs
    assert mean["decode_s"] == as_short["decode_s"] < full["decode_s"]
    assert mean["first_token_s"] == as_short["first_token_s"] < full["first_token_s"]


@pytest.mark.slow
def test_the_command_reports_the_fewest_devices_or_what_is_too_large(tmp_path):
    flags = ("--cluster", "ascend910b", "--input-len", 40, "--output-len", 20)
    outcome = tool("tools/plan.py", "serve", "--size", "tiny", *flags)
    assert outcome.code == 0, outcome.output
    assert "pangu tiny on 1 device " in outcome.output and "No interval is known" in outcome.output
    assert outcome.output.rstrip().endswith("serve CHECKPOINT --max-num-seqs 16 --max-model-len 60")
    told, _ = json.JSONDecoder().raw_decode(tool("tools/plan.py", "serve", "--size", "tiny", *flags, "--json").output)
    assert told["tp"] == 1 and told["load"]["input_len"] == 40
    for more, reason in {
        ("--tp", 3): "--tp 3: mesh",
        ("--tp", 8): "--tp 8",
        ("--output-len", 2000): "tokens are more than",
        ("--max-num-seqs", 0): "--max-num-seqs",
        ("--max-num-seqs", 20_000_000): "give fewer --max-num-seqs",
    }.items():
        refused = tool("tools/plan.py", "serve", "--size", "tiny", *flags, *more)
        assert refused.code == 2 and reason in refused.output, refused.output
        assert "Traceback" not in refused.output


@pytest.mark.parametrize(
    ("changes", "cluster", "load", "reason"),
    [
        ({}, "a100_80gb", {}, None),
        ({}, "a100_40gb", {}, "no figure of a server on a100_40gb"),
        ({}, "ascend910b", {}, "no figure of a server on ascend910b"),
        ({}, "a100_80gb", {"weights": "int8"}, "weights and a KV cache in half precision"),
        ({}, "a100_80gb", {"kv_cache": "int8"}, "weights and a KV cache in half precision"),
        ({"compute_dtype": "float32"}, "a100_80gb", {}, "weights and a KV cache in half precision"),
    ],
)
def test_intervals_are_known_only_where_figures_were_compared(changes, cluster, load, reason):
    model = dataclasses.replace(MODEL, **changes)
    found = serving_intervals(model, read_cluster(Path(cluster)), ServingLoad(**{**SMALL, **load}))
    if reason:
        assert isinstance(found, NoInterval) and reason in found.explain()
    else:
        low, high = found.of("decode_s", 0.01)
        assert low < 0.01 < high and "none is of MindSpore" in found.explain()
        planned = ServingPlan(ServingLoad(**SMALL), 1, 1, 1, 1, 0.1, 0.01, {})
        told = as_dict(planned, found)
        assert told["intervals"]["decode_s"] == (low, high) and set(told["intervals"]) == set(FIGURES)
        told = report(planned, "a model", "1 GB", found)
        assert f"10.0 ms ({low * 1e3:.1f} to {high * 1e3:.1f}) in a step of 4 sequences at a full cache" in told
        assert (
            "planned at the mean context, which these engines read; sporeloom serve, and this plan, read a full" in told
        )


def test_the_interval_of_a_mean_context_is_of_plans_like_it():
    load = ServingLoad(**SMALL, mean_context=110)
    found = serving_intervals(MODEL, read_cluster(Path("a100_80gb")), load)
    told = report(ServingPlan(load, 1, 1, 1, 1, 0.1, 0.01, {}), "a model", "1 GB", found)
    assert "in a step of 4 sequences at a mean context of 110 tokens" in told
    assert "planned at the mean context like this; sporeloom serve reads a full cache" in told


@pytest.mark.parametrize(
    ("length", "chunks"),
    [(100, {64: 2}), (64, {64: 1}), (17, {32: 1}), (1025, {64: 16, 16: 1}), (5, {16: 1})],
)
def test_a_prompt_is_computed_in_the_lengths_that_a_server_compiles(length, chunks):
    assert ServingLoad(**{**SMALL, "input_len": length}).chunks == chunks


def test_the_command_of_several_devices_has_a_strategy_and_all_that_was_planned():
    load = ServingLoad(**{**SMALL, "chunk": 32}, weights="int4-g64", kv_cache="int8")
    planned = ServingPlan(load, 2, 0, 0, 0, 1.0, 1.0, {})
    about, command = start(planned, MODEL, "folder")
    assert about.endswith("strategy.yaml has `mesh: {tp: 2}` and `rules: decoder`:")
    assert command.split() == [
        *(["sporeloom", "serve", "folder", "--max-num-seqs", "4", "--max-model-len", "120", "--prefill-chunk", "32"]),
        *(["--weights", "int4-g64", "--kv-cache", "int8", "--strategy", "strategy.yaml", "--launch"]),
    ]


def test_all_problems_of_the_flags_are_told_at_once():
    with pytest.raises(ConfigError) as told:
        main(["--size", "nope", "--cluster", "nowhere", "--max-num-seqs", "0"])
    assert [sum(word in line for line in told.value.problems) for word in ("max-num-seqs", "nowhere", "nope")] == [
        1
    ] * 3


def test_a_load_fits_into_the_context():
    assert not load_problems(ServingLoad(**SMALL), MODEL)
    (problem,) = load_problems(ServingLoad(**{**SMALL, "input_len": MODEL.seq_len}), MODEL)
    assert f"= {MODEL.seq_len + 20} tokens are more than {MODEL.seq_len}" in problem


@pytest.mark.parametrize("context", [99, 121])
def test_a_mean_context_is_one_that_a_sequence_has(context):
    (problem,) = load_problems(ServingLoad(**SMALL, mean_context=context), MODEL)
    assert f"--mean-context {context}: while an answer is generated, a sequence has 100 to 120 tokens" in problem
    assert "110 on average" in problem
