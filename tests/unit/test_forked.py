# SPDX-License-Identifier: Apache-2.0
"""Processes of a pool fork from one that has loaded what they need, with today's environment, and end with who asked."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

SCRIPT = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from sporeloom.core.processes import begin_forked, forking_context

def look(seconds):
    print(os.getpid(), os.getppid(), "colorsys" in sys.modules, os.environ["NOW"], flush=True)
    time.sleep(seconds)

if __name__ == "__main__":
    context = forking_context("colorsys")
    for now, seconds in ("first", 0), ("second", float(sys.argv[1])):
        os.environ["NOW"] = now
        with ProcessPoolExecutor(1, context, begin_forked, (os.getpid(), dict(os.environ))) as pool:
            pool.submit(look, seconds).result()
"""


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started(path, seconds):
    command = [sys.executable, str(path), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_they_find_the_module_loaded_and_the_environment_of_now(write):
    with started(write("pool.py", SCRIPT), 0) as job:
        first, second = (line.split() for line in job.stdout.read().splitlines())
    assert job.returncode == 0
    assert (first[2:], second[2:]) == (["True", "first"], ["True", "second"])
    assert first[0] != second[0] and first[1] == second[1] != str(job.pid)


@pytest.mark.parametrize(
    ("send", "number"), [(os.kill, signal.SIGKILL), (os.killpg, signal.SIGINT)], ids=["kill", "Ctrl-C"]
)
def test_they_end_with_the_one_that_asked_for_them(write, send, number):
    with started(write("pool.py", SCRIPT), 600) as job:
        lines = [job.stdout.readline().split() for _ in range(2)]
        worker, server = map(int, lines[1][:2])
        assert runs(worker) and runs(server)
        send(job.pid, number)
        said = job.stderr.read()
    assert said.count("Traceback") == (number == signal.SIGINT)  # of the one that asked
    deadline = time.monotonic() + 30
    while runs(worker) or runs(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)
