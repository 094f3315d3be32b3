# SPDX-License-Identifier: Apache-2.0
"""Warm processes for the whole test session: a task costs its own work, not a start of Python, MindSpore and msrun.

`call` and `tool` are what tests use. Processes start with the first task and end with the session, or when a task of
several fails, because the others may then wait for each other for ever; the next task gets new ones.
"""

import atexit
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sporeloom.runtime.launch import free_port

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("farm_worker.py")
GRACE_S = 3.0
"""After a rank failed the others get this long to answer."""
MAX_BYTES = {1: 4_000_000_000, 2: 2_000_000_000, 4: 2_000_000_000}
"""Of each process of a farm that goes on, by how many those are: MindSpore keeps much of what it compiled, and two farms of
seven processes share a machine."""


@dataclass(frozen=True)
class Outcome:
    """What a process, or a job of several, left behind."""

    code: int
    output: str
    """stdout, then stderr; of a job what its ranks said, in order."""
    logs: dict[int, str]
    """Of each rank of a job."""


class Farm:
    """`size` warm processes. A task runs in the first few of them, or all."""

    def __init__(self, size):
        self.size, self.first, self.connections = size, None, []

    def start(self):
        pairs = [socket.socketpair() for _ in range(self.size)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        several = {"MS_WORKER_NUM": str(self.size)} if self.size > 1 else {}
        self.first = subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, descriptors)],
            cwd=ROOT,
            env={**os.environ, **several},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
        )
        for ours, theirs in pairs:
            theirs.close()
            self.connections.append(ours)

    def close(self):
        if self.first:
            self.first.kill()  # and with it those that it forked
            self.first.wait(timeout=30)
        for connection in self.connections:
            connection.close()
        self.first, self.connections = None, []

    def is_full(self):
        """Whether a process holds so much that new ones are due."""
        pid = self.first.pid
        try:
            forks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return any(_memory(each) > MAX_BYTES[self.size] for each in [pid, *forks])
        except OSError:  # it has ended, or there is no /proc
            return False

    def perform(self, file, function, arguments, folder, *, is_tool, processes, timeout, cwd, env):
        """Answers of the ranks, None of one that gave none. Each writes what it says to files in `folder`."""
        if not self.first:
            self.start()
        job = {"MS_WORKER_NUM": str(processes), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(free_port())}
        for rank in range(processes):
            given = {**(env or {}), **({**job, "RANK_ID": str(rank)} if processes > 1 else {"MS_WORKER_NUM": ""})}
            task = {
                "file": str(ROOT / file),
                "function": function,
                "is_tool": is_tool,
                "arguments": list(arguments),
                "folder": str(cwd),
                "environment": given,
                "stdout": str(folder / f"{rank}.out"),
                "stderr": str(folder / (f"{rank}.err" if processes == 1 else f"{rank}.out")),
                "timeout_s": timeout,
            }
            self.connections[rank].sendall(json.dumps(task).encode() + b"\n")
        answers = self._answers(processes, timeout)
        failed = None in answers or (processes > 1 and any(answer["code"] for answer in answers))
        if failed or self.is_full():
            self.close()
        return answers

    def _answers(self, processes, timeout):
        answers, received = [None] * processes, [b""] * processes
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank in range(processes):
                selector.register(self.connections[rank], selectors.EVENT_READ, rank)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    rank = key.data
                    received[rank] += (piece := self.connections[rank].recv(1 << 20))
                    if piece and not received[rank].endswith(b"\n"):
                        continue
                    selector.unregister(self.connections[rank])
                    answers[rank] = json.loads(received[rank]) if piece else None
                    if answers[rank] is None or answers[rank]["code"]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers


def _memory(pid):
    """Bytes that a process holds."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


ONE, TWO, FOUR = FARMS = (Farm(1), Farm(2), Farm(4))
"""A process that has compiled for 4 devices cannot run for 2."""
for each in FARMS:
    atexit.register(each.close)


def _perform(file, function, arguments, **options):
    fresh = options.pop("fresh", False)
    farm = Farm(options["processes"]) if fresh else next(f for f in FARMS if f.size == options["processes"])
    folder = Path(tempfile.mkdtemp(prefix="farm-"))
    try:
        answers = farm.perform(file, function, arguments, folder, **options)
        logs = {}
        for rank in range(options["processes"]):
            files = (folder / f"{rank}.out", folder / f"{rank}.err")
            logs[rank] = "".join(file.read_text(errors="replace") for file in files if file.exists())
        return answers, logs
    except BaseException:  # interrupted: the task would go on
        farm.close()
        raise
    finally:
        if fresh:
            farm.close()
        shutil.rmtree(folder, ignore_errors=True)


def call(file, function, *arguments, processes=1, timeout=300, env=None, fresh=False):
    """What a function of a file returns for `arguments`, all of it JSON; of several processes a list, by rank.

    `fresh`: in processes of its own, because it compiles for other numbers of devices.
    """
    options = {"fresh": fresh, "is_tool": False, "processes": processes, "timeout": timeout, "cwd": ROOT, "env": env}
    answers, logs = _perform(file, function, [_plain(a) for a in arguments], **options)
    failed = [rank for rank, answer in enumerate(answers) if answer is None or answer["code"]]
    assert not failed, "\n".join(f"rank {rank}, {function} of {file}: {logs[rank][-6000:]}" for rank in failed)
    values = [answer["value"] for answer in answers]
    return values[0] if processes == 1 else values


def tool(script, *arguments, processes=1, timeout=300, cwd=ROOT, env=None):
    """The Outcome of tools/NAME.py, as of a process of its own, or of several as under msrun."""
    options = {"is_tool": True, "processes": processes, "timeout": timeout, "cwd": cwd, "env": env}
    answers, logs = _perform(script, "main", [*map(str, arguments)], **options)
    missing = [rank for rank, answer in enumerate(answers) if answer is None]
    codes = [1 if answer is None else answer["code"] for answer in answers]
    said = "".join(logs.values()) + (f"ranks {missing} gave no answer within {timeout} s\n" if missing else "")
    return Outcome(max(codes), said, logs)


def _plain(argument):
    return str(argument) if isinstance(argument, Path) else argument
