# SPDX-License-Identifier: Apache-2.0
"""Launcher of jobs on a machine without devices: loads MindSpore once and forks a process for each rank.

    fork.py MODULE PROCESSES PORT LOG_DIR SCRIPT ARGUMENTS...

MODULE is loaded first, and MindSpore with it. Each process runs SCRIPT as `python SCRIPT ARGUMENTS` would, with its rank in
the variables of msrun, and writes worker_RANK.log. The exit code is 0 if all processes succeed; shortly after the first
failure the others are killed. On devices msrun is used instead, whose processes load MindSpore individually.

If the environment names the read end of a pipe (JOBS), each line of it is a further job, which starts without loading
MindSpore again: `[ENVIRONMENT, PROCESSES, PORT, LOG_DIR, SCRIPT, ARGUMENTS...]` as JSON. LOG_DIR/ends.json then has the exit
code of each job and the processes that ended by themselves, in this order: `[RANK, STATUS]`, STATUS -N after signal N.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":  # Python looks in this folder first, whose modules have common names
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.processes import end_with_parent
from sporeloom.runtime.environment import prepare_environment

GRACE_S = 1.0
"""Seconds in which other ranks can notice a lost rank and report who waited for it."""
LOOK_EVERY_S = 0.05
JOBS = "SPORELOOM_JOBS"
"""Environment variable: number of the file with further jobs."""
ENDS = "ends.json"


def main(argv: Sequence[str]) -> str:
    """Fork the workers and wait for them. Returns the path of the script in the workers; does not return in the
    launcher."""
    module, *first = argv
    further = os.environ.pop(JOBS, "")
    prepare(first)
    with contextlib.suppress(Exception):  # the script loads it as well, and logs the error
        import_module(module)  # it must not start threads, which a fork would lose
    gc.freeze()  # loaded objects stay in memory that all workers share
    code = 0
    for job in jobs(first, int(further)) if further else [first]:
        workers = dict[int, int]()
        if forked(job, workers):
            return job[3]
        code = watch(workers, Path(job[2], ENDS) if further else None)
    sys.exit(code)


def jobs(first: list[str], number: int) -> Iterator[list[str]]:
    """Yield the first job, then those of the file of that number, with their environment."""
    with open(number, encoding="utf-8") as file:
        yield first
        for line in file:
            environment, *job = json.loads(line)
            os.environ |= environment
            prepare(job)
            yield job


def prepare(job: Sequence[str]) -> None:
    """Set the environment of all workers of a job."""
    os.environ |= {"MS_WORKER_NUM": job[0], "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": job[1]}
    prepare_environment()


def forked(job: Sequence[str], workers: dict[int, int]) -> bool:
    """Fork the workers of a job and add their ranks by process. Returns whether this is one of them."""
    count, _, logs, script, *arguments = job
    parent = os.getpid()
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
            return True
        workers[worker] = rank
    return False


def watch(workers: dict[int, int], record: Path | None) -> int:
    """Wait for the workers of a job, kill those that are left, and record in a file how the others ended. Returns the exit
    code."""
    # Workers shut down gracefully, and so does this process.
    before = signal.signal(signal.SIGTERM, lambda *_: send(workers, signal.SIGTERM))
    ends: list[tuple[int, int]] = []
    try:
        code = wait_for(workers, ends)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    send(workers, signal.SIGKILL)
    for worker in workers:
        os.waitpid(worker, 0)
    signal.signal(signal.SIGTERM, before)
    if record:
        write_text_atomically(record, json_text({"code": code, "ends": ends}))
    if code > 128:
        sys.exit(code)
    return code


def wait_for(workers: dict[int, int], ends: list[tuple[int, int]]) -> int:
    """Wait until all workers have exited, or GRACE_S after the first failure; moves them from `workers` to `ends`. Returns
    the exit code."""
    deadline = float("inf")
    while workers and time.monotonic() < deadline:
        ended, status = os.waitpid(-1, 0 if deadline == float("inf") else os.WNOHANG)
        if ended in workers:
            ends.append((workers.pop(ended), os.waitstatus_to_exitcode(status)))
        if ended and status:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if not ended:
            time.sleep(LOOK_EVERY_S)
    return int(deadline < float("inf"))


def send(workers: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to workers; SIGKILL also to the processes that they started."""
    for worker in workers:
        for how in (os.killpg, os.kill) if number == signal.SIGKILL else (os.kill,):
            with contextlib.suppress(ProcessLookupError):  # a worker has its own group only shortly after the fork
                how(worker, number)


if __name__ == "__main__":
    runpy.run_path(main(sys.argv[1:]), run_name="__main__")
