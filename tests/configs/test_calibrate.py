# SPDX-License-Identifier: Apache-2.0
"""A calibration from its command to a simulated step, and the graphs that it measures."""

import json

import pytest
from conftest import call, run, tool

from sporeloom.calibration.samples import PADDING
from sporeloom.planner.cluster import read_cluster

WORKER = "tests/configs/calibrate_worker.py"
BUSY = "run calibrate again while the machine is idle"


def test_a_calibrated_machine_has_estimates_of_its_steps(tmp_path):
    path, one = tmp_path / "here.yaml", tmp_path / "one.yaml"
    one.write_text("mesh: {dp: 1}\n", encoding="utf-8")
    for _ in range(4):
        done = run("-m", "sporeloom", "calibrate", "--quick", "--out", path)
        if BUSY not in done.output:
            break
    else:
        pytest.skip("the machine is too busy to be calibrated, as the command says each time")
    assert done.code == 0, done.output
    assert f"sporeloom dry-run --time --cluster {path}" in done.output
    for kind in ("launch: Add", "product: ", "attention: ", "GeLUGrad", "AdamWeightDecay"):
        assert kind in done.output
    level = read_cluster(path).with_running(1).measured[0]
    assert level.efficiency.matmul == 1.0
    assert "Add" in {line.kind for line in level.operators}

    flags = ("--time", "--cluster", path, "--ranks", 0, "--json")
    told = tool("tools/dry_run.py", *flags, "--strategy", one)
    assert told.code == 0, told.output
    time = json.loads(told.output[told.output.index("{") :])["time"]
    assert sum(time["critical_path"].values()) == pytest.approx(time["seconds"])
    refused = tool("tools/dry_run.py", *flags, "--strategy", "pangu_tiny_dp2")
    assert refused.code != 0
    assert "run sporeloom calibrate --launch 2" in refused.output


def test_collectives_are_called_from_the_graph_with_tensors_of_their_shapes():
    shapes = call(WORKER, "exchanged")
    assert sorted(shapes) == ["AllGather", "AllReduce", "AlltoAll", "ReduceScatter"]
    assert all(given == [[4, 8], [4, 8]] for given in shapes.values())


def test_every_repeated_operator_and_its_gradient_runs():
    kinds = call(WORKER, "operators")
    assert kinds.count("GeLUGrad") == kinds.count("GeLU") == 3
    assert kinds.count("Add") >= PADDING > 100  # or MindSpore would run it in another way than the graphs of steps
