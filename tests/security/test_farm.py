# SPDX-License-Identifier: Apache-2.0
"""Interrupting the tests leaves none of their processes."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

TEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from farm import call

def test_that_sleeps(tmp_path):
    call("tests/farm_sleeper.py", "sleep", {{folder!r}}, processes=4)
"""


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_in_the_midst_of_a_task_of_four_ends_all(tmp_path):
    test = tmp_path / "test_one.py"
    test.write_text(TEST.format(folder=str(tmp_path)))
    running = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(test)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 4, 120)
        workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == pytest.ExitCode.INTERRUPTED
        assert wait_until(lambda: not any(map(is_alive, workers)), 30)
    finally:
        running.kill()
        running.wait(timeout=30)
