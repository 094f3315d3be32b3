# SPDX-License-Identifier: Apache-2.0
"""A run that loses ranks continues on those that are left, and grows back, with the losses of one device."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, TWO_LAYERS, tool

STEPS = 10
TRAIN = ("--data", ROOT / "examples" / "small_town.txt", "--config", TWO_LAYERS, "--seq-len", 32, "--steps", STEPS)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def wait_until(condition, job):
    deadline = time.monotonic() + 150
    while not condition():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def has_resumed(out):
    """Whether the second start has read the state: before that it ends without a trace when it shall grow."""
    return (out / "history.json").exists() and len(json.loads((out / "history.json").read_text())["starts"]) == 2


def kill(job, *ranks):
    processes = {process.name(): process for process in psutil.Process(job.pid).children(recursive=True)}
    for rank in ranks:
        processes[f"rank {rank}"].kill()


def test_a_run_loses_two_ranks_and_grows_back(tmp_path):
    out, devices = tmp_path / "out", tmp_path / "devices"
    alone = tool("tools/train.py", *TRAIN, "--output-dir", tmp_path / "alone")
    assert alone.code == 0, alone.output
    devices.write_text("4\n")
    elastic = ("--strategy", "pangu_tiny_dp2_tp2", "--launch", "--elastic", "--devices-file", devices)
    words = [sys.executable, "tools/train.py", *TRAIN, *elastic, "--output-dir", out]
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: len(lines(out / "metrics.jsonl")) >= 2, job)
        kill(job, 3, 1)
        wait_until(lambda: has_resumed(out), job)
        devices.write_text("4\n")
        assert job.wait(150) == 0, (tmp_path / "log").read_text()
    finally:
        job.kill()
        job.wait()
        log.close()
    metrics = lines(out / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    wanted = [line["loss"] for line in lines(tmp_path / "alone" / "metrics.jsonl")]
    assert [line["loss"] for line in metrics] == pytest.approx(wanted, rel=1e-5)
    events = lines(out / "elastic.jsonl")
    assert [event["event"] for event in events] == ["start", "lost", "start", "resize", "start", "end"]
    meshes = [(event["mesh"]["dp"], event["mesh"]["tp"]) for event in events if event["event"] == "start"]
    assert meshes == [(2, 2), (1, 2), (2, 2)]
    lost = events[1]
    assert sorted(lost["ranks"]) == [1, 3] and lost["devices"] == 2 and lost["step"] - lost["state"] <= 1
    assert not list(Path("/dev/shm").glob(f"sporeloom-{os.getuid()}/{job.pid}-*"))
    assert json.loads((out / "summary.json").read_text())["starts"] == 3
    assert "2 devices are left: restart 1 of at most 3 from step " in (tmp_path / "log").read_text()
