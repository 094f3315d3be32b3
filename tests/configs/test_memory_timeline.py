# SPDX-License-Identifier: Apache-2.0
"""The memory over a step, for every axis, schedule and task that a dry run handles."""

import csv
import json

import pytest
from conftest import call, run
from dry_run_strategies import COMMON, RULES

from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.config import DryRunConfig, check

WORKER = "tests/configs/memory_worker.py"
STRATEGIES = {
    **COMMON,
    "pp2_zero_bubble": ("mesh: {pp: 2}\npipeline: {num_microbatches: 4, schedule: zero_bubble_h1}\n", ()),
    "dp2_cp2": ("mesh: {dp: 2, cp: 2}\n", ()),
    "inference_pp2": ("mesh: {pp: 2, tp: 2}\npipeline: {num_microbatches: 2}\n", ("--inference",)),
    "ppo": ("mesh: {dp: 2}\n", ("--task", "ppo", "--reward-size", "tiny")),
}


def flags_of(folder, settings, *more):
    path = folder / "strategy.yaml"
    path.write_text(settings + RULES, encoding="utf-8")
    return ["--strategy", str(path), "--ranks", "all", *more]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_a_timeline_that_holds_what_the_report_counts(tmp_path, name):
    settings, more = STRATEGIES[name]
    for memory in call(WORKER, "timelines", flags_of(tmp_path, settings, *more)):
        kinds = memory["by_kind"]
        assert sum(kinds.values()) == sum(memory["by_layer"].values()) == memory["live_bytes"]
        counters = kinds["parameter"] + kinds.get("optimizer", 0) - memory["held"]
        assert 0 <= counters <= 64 or "--inference" in more, "the optimizer's own counters are a few numbers"
        assert kinds.get("auxiliary", 0) == memory["auxiliary"]
        assert memory["live_bytes"] <= memory["allocated_bytes"] <= memory["pool_bytes"]
        assert max(size for _, size in memory["curve"]) == memory["live_bytes"]
        assert memory["held"] - 1 <= memory["end"] < memory["live_bytes"], "what a step allocates it frees"


def peaks(folder, settings, *more):
    return [memory["live_bytes"] for memory in call(WORKER, "timelines", flags_of(folder, settings, *more))]


def test_settings_save_what_they_are_for(tmp_path):
    """ZeRO shards state; recomputation keeps fewer activations; gpipe holds all microbatches, 1f1b as many as stages."""
    (one,) = peaks(tmp_path, "mesh: {dp: 2}\n", "--batch-size", "8")
    (sharded,) = peaks(tmp_path, "mesh: {dp: 2}\noptimizer_parallel: {axis: dp}\n", "--batch-size", "8")
    (recomputed,) = peaks(tmp_path, "mesh: {dp: 2}\nrecompute: {layers: all}\n", "--batch-size", "8")
    assert sharded < one
    assert recomputed < one
    pipeline = "mesh: {{pp: 2}}\npipeline: {{num_microbatches: {}, schedule: {}}}\n"
    first = peaks(tmp_path, pipeline.format(8, "1f1b"))[0]
    assert first < peaks(tmp_path, pipeline.format(8, "gpipe"))[0]
    more = peaks(tmp_path, pipeline.format(12, "1f1b"))[0] - first
    boundary = 4 * 128 * 128  # bytes of what stage 0 sends of a microbatch, held until all is sent; and its inputs
    assert 4 * boundary <= more < 5 * boundary


@pytest.mark.parametrize("settings", [{"mesh": {"dp": 2}}, {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 4}}])
def test_a_custom_network_has_a_timeline(settings):
    found = call(WORKER, "custom", settings)
    assert sum(memory["held"] for memory in found) >= 3 * 4 * (32 * 64 + 64 + 64 + 1)
    for memory in found:
        kinds = memory["by_kind"]
        assert kinds["parameter"] + kinds["optimizer"] >= memory["held"]
        assert sum(kinds.values()) == memory["live_bytes"]


def test_the_command_shows_and_exports_it(tmp_path):
    html, blocks, trace = tmp_path / "report.html", tmp_path / "blocks", tmp_path / "trace.json"
    done = run(
        *("-m", "sporeloom", "dry-run", "--strategy", "pangu_tiny_tp2_pp2", "--ranks", "1,last", "--memory"),
        *("--memory-gb", "0.01", "--html", html, "--memory-csv", blocks, "--memory-trace", trace),
    )
    assert done.code == 1, "12 MB do not fit into 10"
    assert "memory over the step, MB at the peak: live" in done.output
    assert done.output.count("DOES NOT FIT") >= 3 and "all fit" not in done.output, "each rank and the job"
    assert "alive at the peak" in done.output
    page = html.read_text(encoding="utf-8")
    assert page.count("<polyline") == 2
    assert page.count("stroke-dasharray='6'") == 2, "the device's limit"
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["pid"] for event in counters} == {1, 3}
    with (blocks / "rank_3" / "memory_block.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    live = max(sum(event["args"].values()) for event in counters if event["pid"] == 3)
    moments = sorted({int(row["start_time_stamp"]) for row in rows})
    used = max(int(row["actual_used_memory"]) for row in rows)
    assert live <= used <= max(int(row["actual_peak_memory"]) for row in rows)
    times = [(int(row["start_time_stamp"]), int(row["end_time_stamp"]), int(row["size"])) for row in rows]
    at_once = max(sum(size for start, end, size in times if start <= now <= end) for now in moments)
    assert used == at_once, "the rows alone say how much is alive at the peak"


def refused(*flags):
    with pytest.raises(ConfigError) as error:
        check(parse_args(DryRunConfig, "", ["--strategy", "pangu_tiny_tp2", *map(str, flags)], check))
    return str(error.value)


def test_what_it_cannot_do_is_refused(tmp_path):
    assert "leave one of both out" in refused("--fast", "--memory")
    assert "--memory-trace" in refused("--memory-trace", tmp_path / "no" / "trace.json")
    assert "--memory-csv" in refused("--memory-csv", tmp_path / "no" / "blocks")
