# SPDX-License-Identifier: Apache-2.0
"""A process that goes on in a child, and ends as that does."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

PROGRAM = """
import os, signal, sys, time
from sporeloom.core.processes import end_later
end_later(0.7)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
what = sys.argv[1]
if what == "wait":
    for _ in range(600):  # a signal just before a sleep is handled after it
        time.sleep(0.1)
elif what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(what))
"""


def start(what):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, what], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    assert child != process.pid
    return process, child


@pytest.mark.parametrize(("what", "code", "is_late"), [("0", 0, False), ("3", 3, True), ("killed", 137, True)])
def test_it_ends_as_its_child_does_and_later_where_that_failed(what, code, is_late):
    process, _ = start(what)
    begin = time.monotonic()
    assert process.wait(10) == code
    assert (time.monotonic() - begin > 0.5) == is_late


def test_a_request_to_stop_is_passed_on():
    process, _ = start("wait")
    process.terminate()
    assert process.wait(10) == 7


def test_the_child_ends_with_it():
    process, child = start("wait")
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=5)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
