# SPDX-License-Identifier: Apache-2.0
"""A simulated step, for every axis and schedule that a dry run handles."""

import json
import random
import re

import pytest
from conftest import call, run
from dry_run_strategies import COMMON, RULES

from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.time.device_model import DeviceModel
from sporeloom.planner.cluster import read_cluster

WORKER = "tests/configs/time_worker.py"
STRATEGIES = {
    **COMMON,
    "pp2_tp2_zero_bubble": ("mesh: {pp: 2, tp: 2}\npipeline: {num_microbatches: 4, schedule: zero_bubble_h1}\n", ()),
    "host": ("mesh: {dp: 2}\noffload: {optimizer: true}\n", ()),
}


def flags_of(folder, settings, *more):
    path = folder / "strategy.yaml"
    path.write_text(settings + RULES, encoding="utf-8")
    return ["--strategy", str(path), "--time", "--cluster", "ascend910b", *more]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_adds_up_and_does_what_the_graphs_hold(tmp_path, name):
    settings, more = STRATEGIES[name]
    found = call(WORKER, "step", flags_of(tmp_path, settings, *more))
    time = found["time"]
    assert sum(time["critical_path"].values()) == pytest.approx(time["seconds"])
    for stage in time["stages"]:
        parts = sum(stage["busy"].values()) + sum(stage["exposed"].values()) + stage["idle_s"]
        assert parts == pytest.approx(time["seconds"])
        assert all(stage["exposed"][kind] <= stage["communication"][kind] * (1 + 1e-9) for kind in stage["exposed"])
    for counted in found["counted"].values():
        assert counted["tasks"] == counted["graph"], "each collective and message once"
        assert counted["simulated_flops"] == counted["flops"]
    assert ("host" in time["stages"][0]["busy"]) == (name == "host")


def test_groups_of_other_stages_share_the_links_of_a_server(tmp_path):
    """Servers of 3: that of ranks 3 to 5 has members of groups of both stages."""
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"chip": "h100", "devices_per_node": 3, "inter_node_port_gb_per_s": 100}))
    settings = "mesh: {pp: 2, dp: 2, tp: 2}\npipeline: {num_microbatches: 2}\n"
    found = call(WORKER, "collectives", [*flags_of(tmp_path, settings), "--cluster", str(path)])
    cluster = read_cluster(path)
    all_send, one_sends = DeviceModel(cluster, 4, 8), DeviceModel(cluster, 4)
    assert {tuple(ranks) for _, _, ranks, _ in found} >= {(0, 2), (4, 6)}
    for kind, size, ranks, seconds in found:
        assert seconds == all_send.collective(kind, size, ranks).seconds
    assert any(seconds > one_sends.collective(kind, size, ranks).seconds for kind, size, ranks, seconds in found)


def test_cpu_processes_tile_what_operators_broadcast(tmp_path):
    on_cpus, on_devices = call(WORKER, "tiled", flags_of(tmp_path, "mesh: {tp: 2}\n"))
    assert on_cpus > on_devices  # which have those of the model itself


def test_more_microbatches_make_the_bubble_smaller(tmp_path):
    pipeline = "mesh: {{pp: 2}}\npipeline: {{num_microbatches: {}}}\n"
    few, many = (call(WORKER, "step", flags_of(tmp_path, pipeline.format(m)))["time"] for m in (2, 8))
    idle = [sum(s["idle_s"] for s in time["stages"]) / 2 / time["seconds"] for time in (few, many)]
    assert idle[1] < idle[0] < 1 / 2


def test_the_command_reports_and_traces_a_step(tmp_path):
    trace, html = tmp_path / "step.json", tmp_path / "report.html"
    flags = (
        "--strategy",
        "pangu_tiny_tp2_pp2",
        "--ranks",
        0,
        "--cluster",
        "ascend910b",
        "--trace",
        trace,
        "--html",
        html,
    )
    done = run("-m", "sporeloom", "dry-run", *flags)
    assert done.code == 0, done.output
    page = html.read_text(encoding="utf-8")
    drawn = re.findall(r"<title>(forward|backward) of part \d: ([\d.]+) to ([\d.]+) ms", page)
    assert [name for name, *_ in drawn].count("forward") == [name for name, *_ in drawn].count("backward") == 2 * 4
    milliseconds = float(re.search(r"step on ascend910b: ([\d.]+) ms", done.output)[1])
    events = [event for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 2}, "a process for each stage, though one rank is reported"
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(milliseconds * 1e3, abs=10)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time"], "--time simulates a step on a cluster: name one"),
        (["--cluster", "h100"], "--cluster names what a step is simulated on: add --time"),
        (["--time", "--cluster", "h100", "--fast"], "--fast compiles a few layers"),
        (["--time", "--cluster", "h100", "--inference"], "--time simulates training steps"),
        (["--time", "--cluster", "h100", "--task", "ppo"], "--time simulates steps that only train"),
        (["--time", "--cluster", "h1000"], "h1000"),
        (["--cluster", "h100", "--trace", "nowhere/step.json"], "--trace nowhere/step.json: no file can be written"),
    ],
)
def test_what_cannot_be_simulated_is_refused(flags, message):
    with pytest.raises(ConfigError) as error:
        check(parse_args(DryRunConfig, "", ["--strategy", "pangu_tiny_dp2", *flags], check))
    assert message in str(error.value)


def random_strategy(rng):
    """A strategy of a layer or more on each stage, its sequences and gradient accumulation steps."""
    pp, dp, tp, rows = (rng.choice(choices) for choices in ((1, 2, 4), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4)))
    settings = f"mesh: {{pp: {pp}, dp: {dp}, tp: {tp}}}\n"
    settings += "pipeline: {num_microbatches: 8}\n" if pp > 1 else ""
    settings += "optimizer_parallel: {axis: dp}\n" if dp > 1 and rng.random() < 0.5 else ""
    return settings, dp * 8 * rows, 1 if pp > 1 else 8


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_products_take_what_the_closed_form_says(tmp_path, seed):
    """On random strategies. How far whole steps agree: benchmarks/results/step_time.md."""
    config = {"num_layers": 4, "compute_dtype": "bfloat16", "attention": "plain"}
    model = tmp_path / "model.json"
    model.write_text(json.dumps(config), encoding="utf-8")
    settings, batch_size, accumulate = random_strategy(random.Random(seed))
    more = ("--model", "pangu", "--size", "13b", "--config", str(model))
    size = ("--batch-size", str(batch_size), "--accumulate", str(accumulate))
    time = call(WORKER, "step", flags_of(tmp_path, settings, *more, *size))["time"]
    products = max(stage["busy"]["matmul"] for stage in time["stages"])
    assert products == pytest.approx(time["closed_form"]["matmul"], rel=0.05)
