# SPDX-License-Identifier: Apache-2.0
"""The processes of a job, forked from one or started by msrun: the same ranks, logs and exit codes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sporeloom.cli.generate import TERMINAL
from sporeloom.cli.serve import SERVER
from sporeloom.dry_run.pool import COMPILER
from sporeloom.runtime import environment
from sporeloom.runtime.launch import ENGINE, FORK, free_port, launch
from sporeloom.train.launch import TRAINER

pytestmark = pytest.mark.slow

RANKS = """
import os, sys
if os.environ.get("MS_ROLE") != "MS_SCHED":
    print(os.environ["RANK_ID"], "of", os.environ["MS_WORKER_NUM"], *sys.argv[1:], "mindspore" in sys.modules, __name__)
    if os.environ["RANK_ID"] == sys.argv[1]:
        raise SystemExit(3)
"""


@pytest.mark.parametrize("with_devices", [False, True])
def test_every_process_knows_its_rank_and_the_first_that_fails_ends_all(
    with_devices, tmp_path, monkeypatch, capfd, write
):
    monkeypatch.setattr(environment, "DEVICE_FILES", {os.devnull if with_devices else "/nowhere": "Ascend"})
    script, logs = str(write("ranks.py", RANKS)), tmp_path / "logs"
    assert launch(script, ["none", "--flag"], 2, logs, shown_rank=1) == 0
    said = [f"{rank} of 2 none --flag {not with_devices} __main__\n" for rank in range(2)]
    assert [(logs / f"worker_{rank}.log").read_text() for rank in range(2)] == said
    assert capfd.readouterr().out == said[1]
    assert launch(script, ["0"], 2, logs, shown_rank=1) == 1
    assert f"the job failed; see the logs in {logs}" in capfd.readouterr().err


MISTAKEN = """
from sporeloom.core.errors import ConfigError, run_tool

def main(argv):
    print("begins", flush=True)
    raise ConfigError(["this cannot be", "nor that"])

run_tool(main)
"""


def test_a_users_mistake_is_told_once_on_stderr(tmp_path, write, capfd):
    assert launch(str(write("mistaken.py", MISTAKEN)), [], 2, tmp_path / "logs", shown_rank=1, loads="json") == 2
    assert capfd.readouterr() == ("begins\n", "error: this cannot be\nerror: nor that\n")


PATIENT = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: (print("stops"), exit(0)))
print("waits", flush=True)
signal.pause()
"""


def test_a_request_to_stop_is_passed_on(tmp_path, write):
    logs = [tmp_path / f"worker_{rank}.log" for rank in range(2)]
    command = [sys.executable, FORK, "json", "2", str(free_port()), str(tmp_path), str(write("patient.py", PATIENT))]
    with subprocess.Popen(command) as job:
        deadline = time.monotonic() + 60
        while not all(log.exists() and log.read_text() for log in logs):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().count(" ") == 2
        job.terminate()
        assert job.wait(30) == 0
    assert [log.read_text() for log in logs] == ["waits\nstops\n"] * 2


def test_what_cannot_be_loaded_is_told_by_the_script(tmp_path, write, capfd):
    script = str(write("loads.py", "import no_such_module\n"))
    assert launch(script, [], 2, tmp_path / "logs", shown_rank=1, loads="no_such_module") == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in capfd.readouterr().err


def test_what_is_loaded_before_a_fork_starts_no_thread():
    code = f"""
import os
from importlib import import_module
from sporeloom.certification.shrink import SUBJECT
for module in (*{[ENGINE, TRAINER, TERMINAL, SERVER, COMPILER]!r}, SUBJECT):
    import_module(module)
print(len(os.listdir("/proc/self/task")))
"""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
