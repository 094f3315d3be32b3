# SPDX-License-Identifier: Apache-2.0
"""Launcher of jobs on a machine without devices: loads MindSpore once and forks a process for each rank.

    fork.py MODULE PROCESSES PORT LOG_DIR SCRIPT ARGUMENTS...

MODULE is loaded first, and MindSpore with it. Each process runs SCRIPT as `python SCRIPT ARGUMENTS` would, with its rank in
the variables of msrun, and writes worker_RANK.log. The exit code is 0 if all processes succeed; shortly after the first
failure the others are killed. On devices msrun is used instead, whose processes load MindSpore individually.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import sys
import time
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":  # Python looks in this folder first, whose modules have common names
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from sporeloom.core.processes import end_with_parent
from sporeloom.runtime.environment import prepare_environment

GRACE_S = 1.0
"""Seconds in which other ranks can notice a lost rank and report who waited for it."""
LOOK_EVERY_S = 0.05


def main(argv: Sequence[str]) -> str:
    """Fork the workers and wait for them. Returns the path of the script in the workers; does not return in the
    launcher."""
    module, count, port, logs, script, *arguments = argv
    os.environ |= {"MS_WORKER_NUM": count, "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": port}
    prepare_environment()
    with contextlib.suppress(Exception):  # the script loads it as well, and logs the error
        import_module(module)  # it must not start threads, which a fork would lose
    gc.freeze()  # loaded objects stay in memory that all workers share
    parent, workers = os.getpid(), set()
    for rank in range(int(count)):
        if (worker := os.fork()) == 0:
            end_with_parent(parent)
            os.setsid()  # a terminal's Ctrl-C is for the launcher only
            os.environ |= {"RANK_ID": str(rank), "DEVICE_ID": str(rank)}
            with contextlib.suppress(OSError):
                Path("/proc/self/comm").write_text(f"rank {rank}")  # its name in `ps` and `top`
            log = os.open(Path(logs) / f"worker_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).parent)
            return script
        workers.add(worker)
    # Workers shut down gracefully, and so does this process.
    signal.signal(signal.SIGTERM, lambda *_: tell(workers, signal.SIGTERM))
    try:
        code = wait_for(workers)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    tell(workers, signal.SIGKILL)
    sys.exit(code)


def wait_for(workers: set[int]) -> int:
    """Wait until all workers have exited, or GRACE_S after the first failure; removes them from `workers`. Returns the
    exit code."""
    deadline = float("inf")
    while workers and time.monotonic() < deadline:
        ended, status = os.waitpid(-1, 0 if deadline == float("inf") else os.WNOHANG)
        workers.discard(ended)
        if ended and status:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if not ended:
            time.sleep(LOOK_EVERY_S)
    return int(deadline < float("inf"))


def tell(workers: Collection[int], number: signal.Signals) -> None:
    """Send a signal to workers; SIGKILL also to the processes that they started."""
    for worker in workers:
        for send in (os.killpg, os.kill) if number == signal.SIGKILL else (os.kill,):
            with contextlib.suppress(ProcessLookupError):  # a worker has its own group only shortly after the fork
                send(worker, number)


if __name__ == "__main__":
    runpy.run_path(main(sys.argv[1:]), run_name="__main__")
