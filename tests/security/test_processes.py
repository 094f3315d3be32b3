# SPDX-License-Identifier: Apache-2.0
"""Whatever is killed, nothing that it started goes on: no process, no socket."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, msrun_command, msrun_env

TEXT = ROOT / "examples" / "small_town.txt"
STRATEGY = CONFIGS / "pangu_tiny_tp2.yaml"

pytestmark = pytest.mark.slow


def mine(folder):
    """Processes whose command line names `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found += [process] if str(folder) in " ".join(process.cmdline()) else []
        except psutil.Error:
            pass
    return found


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def start(command, **options):
    return subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    )


def train(out, steps=100_000):
    return (
        "tools/train.py",
        "--data",
        TEXT,
        "--config",
        TWO_LAYERS,
        "--steps",
        steps,
        "--seq-len",
        32,
        "--output-dir",
        out,
        "--strategy",
        STRATEGY,
    )


def has_steps(out, count=3):
    path = out / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) > count


@pytest.fixture
def temporary():
    """A folder for the sockets of this test's jobs: others are starting meanwhile. Its name is short, as sockets' must be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("moment", ["while it starts", "while it trains", "what forked its ranks"])
def test_a_launched_job_ends_with_its_launcher(tmp_path, temporary, moment):
    out = tmp_path / "out"
    job = start((sys.executable, *train(out), "--launch"), env={**os.environ, "TMPDIR": str(temporary)})
    try:
        if moment == "while it starts":
            wait_until(lambda: len(mine(out)) >= 3)
        else:
            wait_until(lambda: has_steps(out))
            assert list(temporary.iterdir()) == [temporary / f"sporeloom-{os.getuid()}"]
            assert not any(path.is_socket() for path in temporary.rglob("*"))  # all are connected: the names are gone
        (forks,) = psutil.Process(job.pid).children()
        os.kill(forks.pid if moment == "what forked its ranks" else job.pid, signal.SIGKILL)
        assert job.wait(20) != 0
        wait_until(lambda: mine(out) == [], 20)
    finally:
        for process in mine(out):
            process.kill()


def test_workers_end_with_msrun(tmp_path):
    out = tmp_path / "out"
    job = start(msrun_command(2, tmp_path / "logs", *train(out)), env=msrun_env())
    try:
        wait_until(lambda: has_steps(out))
        os.kill(job.pid, signal.SIGKILL)
        wait_until(lambda: [p for p in mine(out) if "tail" not in p.name()] == [], 20)  # msrun's own tail -f stays
        assert job.wait(20) == -signal.SIGKILL
    finally:
        job.wait(20)
        for process in mine(tmp_path):
            process.kill()


def test_msrun_that_does_not_wait_leaves_its_workers_to_their_work(tmp_path):
    out = tmp_path / "out"
    command = [word for word in msrun_command(2, tmp_path / "logs", *train(out, 3)) if word != "--join=True"]
    assert start(command, env=msrun_env()).wait(60) == 0
    wait_until(lambda: (out / "checkpoint").exists())
    wait_until(lambda: mine(out) == [], 30)


def test_ranks_in_wrappers_find_each_other(tmp_path):
    """A shell or `timeout` around each rank: their parents differ, what msrun tells them does not."""
    out = tmp_path / "out"
    told = {
        "MS_WORKER_NUM": "2",
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(os.getpid()),
    }
    jobs = []
    for rank in range(2):
        wrapper = ("timeout", "100") if rank % 2 else ("sh", "-c", '"$@"; exit $?', "sh")
        environment = {**os.environ, **told, "RANK_ID": str(rank)}
        jobs.append(start((*wrapper, sys.executable, *train(out, 3)), env=environment))
    assert [job.wait(100) for job in jobs] == [0] * 2
    assert has_steps(out, 2)
