# SPDX-License-Identifier: Apache-2.0
"""The processes of a job on a machine without devices: forked from one that has loaded MindSpore once for all.

fork.py MODULE PROCESSES PORT LOG_DIR SCRIPT ARGUMENTS...

MODULE is loaded first, and MindSpore with it. Each process runs SCRIPT as `python SCRIPT ARGUMENTS` would, knows its rank as
under msrun, and writes worker_RANK.log. The exit code is 0 if all of them ended well; the others are killed soon after the
first that did not. Devices want msrun, whose processes load MindSpore each for itself.
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

from sporeloom.processes import end_with_parent
from sporeloom.runtime.environment import prepare_environment

GRACE_S = 1.0
"""For the others to notice that a rank is gone, and to say who waited for it."""
LOOK_EVERY_S = 0.05


def main(argv: Sequence[str]) -> str:
    """Fork, and wait; does not return but in the processes that are to run the script, with its path."""
    module, count, port, logs, script, *arguments = argv
    os.environ |= {"MS_WORKER_NUM": count, "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": port}
    prepare_environment()
    with contextlib.suppress(Exception):  # the script loads it, too, and says in its log what is wrong
        import_module(module)  # none that starts a thread, which a fork would not have
    gc.freeze()  # what is loaded stays where it is, in memory that all share
    parent, workers = os.getpid(), set()
    for rank in range(int(count)):
        if (worker := os.fork()) == 0:
            end_with_parent(parent)
            os.setsid()  # a terminal's Ctrl-C is for the one that waits
            os.environ |= {"RANK_ID": str(rank), "DEVICE_ID": str(rank)}
            with contextlib.suppress(OSError):
                Path("/proc/self/comm").write_text(f"rank {rank}")  # what `ps` and `top` call it
            log = os.open(Path(logs) / f"worker_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).parent)
            return script
        workers.add(worker)
    # Who end in good order, and so does this one.
    signal.signal(signal.SIGTERM, lambda *_: tell(workers, signal.SIGTERM))
    try:
        code = wait_for(workers)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    tell(workers, signal.SIGKILL)
    sys.exit(code)


def wait_for(workers: set[int]) -> int:
    """Until all have ended, or GRACE_S after the first that ended badly; `workers` are those left. Returns the exit code."""
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
    """Send a signal to these, and if it kills to what they started."""
    for worker in workers:
        for send in (os.killpg, os.kill) if number == signal.SIGKILL else (os.kill,):
            with contextlib.suppress(ProcessLookupError):  # a group of its own it has a moment after it was forked
                send(worker, number)


if __name__ == "__main__":
    runpy.run_path(main(sys.argv[1:]), run_name="__main__")
