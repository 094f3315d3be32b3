# SPDX-License-Identifier: Apache-2.0
"""The intervals of step times: from the recorded fits, of which every row's error is predicted again here."""

import collections
import dataclasses
import hashlib
import importlib
import json
import math
from pathlib import Path

import pytest
from conftest import ROOT, shared

from sporeloom.models.adapters import LoRAConfig
from sporeloom.planner.cluster import Cluster, chips, fitted_efficiency, read_cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.errors import ERRORS, NoInterval, TimeInterval, interval_values, published_errors, time_interval
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.report import as_dict, strategy_file, table
from sporeloom.planner.search import PlanRequest, search
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask

RECORDED = ROOT / "benchmarks/results/planner_errors.json"
DENSE = Dimensions(num_layers=8, hidden_size=1024, num_heads=16, vocab_size=50_000, seq_len=1024)
EXPERTS = dataclasses.replace(
    DENSE, num_experts=8, experts_per_token=2, expert_ffn_size=1024, expert_layers=8, gated_mlp=True
)


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("planner_errors")


def test_what_is_shown_is_what_the_script_makes_of_the_recorded_fits(recorded, script):
    assert ERRORS.read_text() == script.errors_text(recorded)


def test_the_recorded_errors_are_those_of_the_published_runs(recorded, script):
    """A change of the cost model, of its rules or of the files needs new fits: benchmarks/planner_errors.py."""
    paths = {name: shared(f"facts/{name}") for name in recorded["inputs"]}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()} == recorded["inputs"]
    pairs = {
        "dense": script.dense_pairs(paths["published_runs.csv"]),
        "experts": script.fit_experts.pairs_of(paths["published_moe_runs.csv"]),
    }
    for kind, found in pairs.items():
        rows = script.held_out_rows(recorded["fits"], found)
        assert [row[:3] for row in rows] == [row[:3] for row in recorded[kind]]
        assert [row[3] for row in rows] == pytest.approx([row[3] for row in recorded[kind]], abs=1e-4)


def test_no_fit_has_seen_the_publisher_whose_rows_it_predicts(recorded, script):
    pairs = script.dense_pairs(shared("facts/published_runs.csv"))
    publishers = {script.publisher_of(run.source) for run, _ in pairs}
    for publisher in publishers:
        rest = script.without(pairs, publisher)
        assert 0 < len(rest) < len(pairs) and publisher not in {script.publisher_of(run.source) for run, _ in rest}
    assert {row[1] for row in recorded["dense"]} == publishers <= recorded["fits"].keys()
    with pytest.raises(SystemExit, match="add it to PUBLISHERS"):
        script.publisher_of("somebody else")


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_four_in_five_held_out_runs_are_inside_on_every_chip(recorded, kind):
    rows, shown = recorded[kind], published_errors()[kind]
    assert shown.keys() - {"all"} == {chip for _, _, chip, _ in rows} and published_errors()["coverage"] == 0.8
    for chip, one in shown.items():
        own = [(publisher, math.exp(-error)) for _, publisher, of, error in rows if chip in (of, "all")]
        inside = sum(one["low"] <= ratio <= one["high"] for _, ratio in own) / len(own)
        assert one["rows"] == len(own) and inside >= 0.8, chip
        assert one["inside"] == pytest.approx(inside, abs=1e-3)
        assert one["publishers"] == len({publisher for publisher, _ in own})
        sizes = sorted(abs(1 / ratio - 1) for _, ratio in own)
        middle = (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2
        assert one["median"] == pytest.approx(middle, abs=6e-4)
        if one["joined_with_all"]:
            assert one["low"] <= shown["all"]["low"] and one["high"] >= shown["all"]["high"]
            assert one["publishers"] < 3
    assert not shown["all"]["joined_with_all"]


@pytest.mark.parametrize(("count", "rank"), [(1, 1), (3, 3), (4, 4), (5, 5), (9, 8), (19, 16), (100, 81)])
def test_the_interval_is_that_of_split_conformal_prediction(script, count, rank):
    """The row whose rank is 0.8 (n + 1), rounded up, of the sizes of the log errors, whatever their signs."""
    rows = [["", "", "", (-1) ** i * i / 100] for i in range(count, 0, -1)]
    low, high = script.interval(rows)
    assert (low, high) == pytest.approx((math.exp(-rank / 100), math.exp(rank / 100)), abs=1.1e-3)
    assert script.inside(rows, (low, high)) == rank / count >= 0.8


@pytest.mark.parametrize("chip", chips())
@pytest.mark.parametrize("dims", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_every_chip_has_an_interval_and_says_of_which_runs(chip, dims):
    errors = published_errors()["experts" if dims.num_experts else "dense"]
    found = time_interval(dims, Parallelism(), Cluster.of_chip(chip))
    assert isinstance(found, TimeInterval) and 0 < found.low < 1 < found.high
    one = errors.get(chip, errors["all"])
    assert (found.low, found.high, found.median_error) == (one["low"], one["high"], one["median"])
    is_own = chip in errors and not errors[chip]["joined_with_all"]
    assert ("on all chips" in found.explain()) != is_own
    assert (f"none of them on {chip}," in found.explain()) == (chip not in errors)
    assert found.of(2.0) == (2 * found.low, 2 * found.high)


CLUSTER = Cluster.of_chip("ascend910b")


@pytest.mark.parametrize(
    ("job", "cluster", "task", "why"),
    [
        (Parallelism(precision="fp32"), CLUSTER, PLAIN_TEXT, "float32"),
        (
            Parallelism(pp=2, virtual_stages=2, schedule="zero_bubble_v"),
            CLUSTER,
            PLAIN_TEXT,
            "the schedule zero_bubble_v",
        ),
        (Parallelism(pp=2, virtual_stages=2, schedule="gpipe"), CLUSTER, PLAIN_TEXT, "the schedule gpipe"),
        (Parallelism(optimizer_on_host=True), CLUSTER, PLAIN_TEXT, "the host's memory"),
        (Parallelism(offloaded_layers=(2,)), CLUSTER, PLAIN_TEXT, "the host's memory"),
        (Parallelism(), dataclasses.replace(CLUSTER, efficiency=CLUSTER.fitted), PLAIN_TEXT, "the cluster file"),
        (Parallelism(), CLUSTER, TrainedTask("sft", lora=LoRAConfig(r=4)), "adapters alone"),
        (Parallelism(), CLUSTER, TrainedTask("dpo"), "the task dpo"),
        (Parallelism(), CLUSTER, TrainedTask("grpo"), "the task grpo"),
    ],
)
def test_what_no_published_run_is_like_has_no_interval(job, cluster, task, why):
    found = time_interval(DENSE, job, cluster, task)
    assert isinstance(found, NoInterval) and why in found.explain()
    assert interval_values(found, 1.0)["step_time_interval_s"] is None


def test_a_plan_shows_the_interval_with_each_time():
    request = PlanRequest(dims=DENSE, cluster=CLUSTER, devices=8, global_batch_size=64)
    options = search(request)[:3]
    one = published_errors()["dense"]["ascend910b"]
    text = table(request, options)
    for option in options:
        low, high = one["low"] * option.seconds, one["high"] * option.seconds
        assert f"{option.seconds:8.3f} {f'{low:.3g} to {high:.3g}':>14} " in text
        values = as_dict(option, options[0], CLUSTER)
        assert values["step_time_interval_s"] == pytest.approx((low, high))
        assert values["interval"]["meaning"] in text
    low, high = one["low"] * options[0].seconds, one["high"] * options[0].seconds
    assert f"({low:.3g} to {high:.3g} s for 80% of runs)" in strategy_file(request, options[0], "decoder.yaml")
    in_float32 = dataclasses.replace(request, precision="fp32")
    assert "interval: no interval is known: none of the published runs computes in float32" in table(
        in_float32, search(in_float32)[:1]
    )


def test_a_plan_on_the_super_node_says_that_no_run_on_it_is_published():
    cluster = read_cluster(Path("cloudmatrix384"))
    request = PlanRequest(dims=DENSE, cluster=cluster, devices=64, global_batch_size=64)
    best = search(request)[0]
    interval = time_interval(DENSE, best.job, cluster)
    assert isinstance(interval, NoInterval)
    why = "no run on dies of Ascend 910C is published; their efficiencies are those fitted on ascend910b"
    assert interval.why == why and cluster.fitted == fitted_efficiency("ascend910b")
    text = table(request, [best])
    assert " on 64 dies of Ascend 910C, " in text and text.endswith(f"interval: no interval is known: {why}")
    assert strategy_file(request, best, "decoder").startswith("# Planned for 64 dies of Ascend 910C: step ")


def test_efficiencies_of_the_file_are_the_reason_before_the_name_of_devices():
    own = dataclasses.replace(CLUSTER, unpublished="cards", efficiency=CLUSTER.fitted)
    found = time_interval(DENSE, Parallelism(), own)
    assert isinstance(found, NoInterval) and found.why.startswith("the cluster file gives efficiencies")


def test_a_name_of_devices_stays_in_the_line_of_a_comment(write):
    cluster = read_cluster(write("c.yaml", 'chip: h100\nunpublished: "cards\\nmesh: 8"\n'))
    assert cluster.device_name == "cards mesh: 8"
    assert Cluster.of_chip("h100").device_name == "h100"


def test_publishers_are_organisations(script):
    sources = collections.Counter(
        script.publisher_of(source)
        for source in (
            "arXiv:2104.04473 Table 2",
            "NVIDIA/NeMo-Framework-Launcher@f84f0a2c README 7.1.2",
            "github NVIDIA/Megatron-LM README (2021-22)",
            "mindformers@ece44cc45490 (r1.5.0) research/telechat/README.md",
            "Ascend/AscendSpeed@64b1937 README + examples/*.sh",
        )
    )
    assert sources == {"NVIDIA": 3, "Huawei": 2}
