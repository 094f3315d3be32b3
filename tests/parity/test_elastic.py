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

STEPS = 14
TRAIN = ("--data", ROOT / "examples" / "small_town.txt", "--config", TWO_LAYERS, "--seq-len", 32, "--steps", STEPS)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def wait_until(condition, job):
    deadline = time.monotonic() + 150
    while not condition():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill(job, rank):
    (process,) = (p for p in psutil.Process(job.pid).children(recursive=True) if p.name() == f"rank {rank}")
    process.kill()


def test_two_ranks_are_lost_and_the_run_shrinks_twice_and_grows_back(tmp_path):
    out, devices = tmp_path / "out", tmp_path / "devices"
    alone = tool("tools/train.py", *TRAIN, "--output-dir", tmp_path / "alone")
    assert alone.code == 0, alone.output
    devices.write_text("4\n")
    elastic = ("--strategy", "pangu_tiny_dp2_tp2", "--launch", "--elastic", "--devices-file", devices)
    words = [sys.executable, "tools/train.py", *TRAIN, *elastic, "--output-dir", out]
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        for steps, rank, starts in ((2, 3, 2), (5, 1, 3)):
            wait_until(lambda steps=steps: len(lines(out / "metrics.jsonl")) >= steps, job)
            kill(job, rank)
            wait_until(
                lambda starts=starts: sum(e["event"] == "start" for e in lines(out / "elastic.jsonl")) == starts, job
            )
        wait_until(lambda: len(lines(out / "metrics.jsonl")) >= 8, job)
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
    assert [event["event"] for event in events] == ["start", "lost", "start", "lost", "start", "resize", "start", "end"]
    meshes = [(event["mesh"]["dp"], event["mesh"]["tp"]) for event in events if event["event"] == "start"]
    assert meshes == [(2, 2), (1, 2), (1, 1), (2, 2)]
    lost = [event for event in events if event["event"] == "lost"]
    assert [event["ranks"] for event in lost] == [[3], [1]]
    assert all(event["step"] - event["state"] <= 1 for event in lost)
    assert not list(Path("/dev/shm").glob(f"sporeloom-{os.getuid()}/{job.pid}-*"))
    assert json.loads((out / "summary.json").read_text())["starts"] == 4
    said = (tmp_path / "log").read_text()
    assert "lost rank 3 (SIGKILL) after step " in said and "restart 2 of at most 3 from step " in said


def test_no_restart_is_left_and_the_run_ends_with_the_cause(tmp_path):
    """A rank of its own script, which is killed at once: too few devices, and too many restarts."""
    out = tmp_path / "out"
    elastic = ("--strategy", "pangu_tiny_tp2", "--launch", "--elastic", "--max-restarts", 0)
    words = [sys.executable, "tools/train.py", *TRAIN, *elastic, "--output-dir", out]
    job = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: len(lines(out / "metrics.jsonl")) >= 2, job)
    kill(job, 0)
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 1, said
    assert "lost rank 0 (SIGKILL) after step " in said and "no restart is left of --max-restarts 0" in said
    assert "rank 1: rank 0 is gone (its last step was " in said
