# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a job on this machine, and reports the cause in one message when a worker fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from sporeloom.core.errors import EXIT_BAD_INPUT, ConfigError, silence
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import split_lines
from sporeloom.core.log import MARK
from sporeloom.core.processes import FAST_MALLOC, LAUNCHER, MALLOC, end_with_parent
from sporeloom.runtime.environment import devices
from sporeloom.runtime.fork import ENDS, JOBS
from sporeloom.strategy.mesh import Mesh

TOLD = MARK.encode(), b"error: "
"""Prefixes of lines that belong on stderr."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a job that stopped gracefully on request."""
STOPPED_MARK = f"{MARK}stopped after step "
GONE = re.compile(r"^rank \d+: rank (\d+) is gone", re.M)
LOOK_EVERY_S = 0.05
PER_CORE = 4
"""Number of processes that can share a core."""
PROCESS_GB = 0.4
"""Memory in GB of a process without a model, in addition to memory shared between processes."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SPORELOOM = str(Path(__file__).resolve().parents[1] / "__main__.py")
FORK = str(Path(__file__).with_name("fork.py"))
BIN = Path(sys.executable).parent
ENGINE = "sporeloom.runtime.engine"
LAUNCHER_FLAGS = ("--launch", "--oversubscribe")
"""Flags that are for the launcher alone."""


def launch_verb(verb: str, argv: Sequence[str], mesh: Mesh, log_dir: Path, loads: str = ENGINE) -> int:
    """Run `sporeloom VERB` in as many processes as the mesh has ranks, and print the output of its logging rank.
    Returns the exit code."""
    if "--oversubscribe" not in argv and (problem := too_many(mesh.size)):
        raise ConfigError(problem)
    arguments = [verb, *(argument for argument in argv if argument not in LAUNCHER_FLAGS)]
    shown = mesh.first_rank_of_last_stage
    return launch(SPORELOOM, arguments, mesh.size, log_dir, shown, loads, is_read=verb == "generate")


def too_many(num_processes: int) -> str | None:
    """The message that so many processes exceed this machine's CPUs or memory; None if they do not."""
    if devices():
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free, needed = free_memory_gb(), num_processes * PROCESS_GB
    if num_processes <= max(4, PER_CORE * cores) and (free is None or needed <= free):
        return None
    memory = "" if free is None else f" and {free:.0f} GB of free memory"
    return (
        f"--launch: {num_processes} processes on {cores} cores{memory}; without a model they need {needed:.0f} GB, and "
        f"more than {PER_CORE} a core hardly move. Take a strategy for fewer, or give --oversubscribe if you mean it"
    )


def free_memory_gb() -> float | None:
    """Available memory in GB; None if no system file reports it."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    return int(found.group(1)) * 1024 / 1e9 if found else None


def launch(
    script: str,
    arguments: Sequence[str],
    num_processes: int,
    log_dir: Path,
    shown_rank: int,
    loads: str = ENGINE,
    is_read: bool = True,
) -> int:
    """Run `script` in `num_processes` workers and print the output of rank `shown_rank`. Returns the exit code.

    After a failure the last lines of the first failing rank are printed. The job ends when this process ends, for any reason.

    Args:
        log_dir: folder for the logs of all workers.
        loads: module that the script will load, and MindSpore with it; on CPUs it is loaded once for all workers.
        is_read: whether the job ends when its output is closed (head, less); otherwise it continues, to write its files.
    """
    with Jobs(loads) as jobs:
        ended = run_job(jobs, script, arguments, num_processes, log_dir, shown_rank, is_read)
    return ended.report()


@dataclass(frozen=True)
class Ended:
    """The end of a job."""

    code: int
    """Exit code of the process that started the workers, -N after signal N."""
    ends: list[tuple[int, int]]
    """Rank and exit code, -N after signal N, of the workers that ended by themselves, in this order. Empty if not known."""
    log_dir: Path
    shown: str = field(repr=False)
    """The output of the logging rank."""

    @property
    def is_stopped(self) -> bool:
        """Whether it stopped gracefully on request."""
        return bool(self.code) and STOPPED_MARK in self.shown

    def lost_ranks(self) -> list[tuple[int, int]]:
        """Ranks that were killed, with -N for signal N; where that is not known, those that others missed, with 1."""
        if self.ends:
            return [(rank, status) for rank, status in self.ends if status < 0]
        logs = (log.read_text(encoding="utf-8", errors="replace") for log in self.log_dir.glob("worker_*.log"))
        return [(rank, 1) for rank in sorted({int(rank) for text in logs for rank in GONE.findall(text)})]

    def has_own_error(self) -> bool:
        """Whether the logs show an error of the run itself. On devices a traceback may come from the loss of another rank."""
        report = failure_report(self.log_dir)
        return report.startswith("error: ") or (" failed first (" in report and not devices())

    def report(self) -> int:
        """Print the cause of a failure. Returns the exit code of the command."""
        if not self.code:
            return 0
        if self.is_stopped:
            return STOPPED
        report = failure_report(self.log_dir)
        is_mistake = report.startswith("error: ")
        if not (is_mistake and report in self.shown):  # a user's mistake is in every log, and was shown already
            print(report, file=sys.stderr)
        return EXIT_BAD_INPUT if is_mistake else 1


class Jobs:
    """Starts jobs on this machine. A context manager, which ends the process that starts the workers.

    Args:
        loads: module that the scripts will load.
        are_several: whether there may be several jobs, one after another. On CPUs all then start from one process.
        command: command line that starts the workers instead, with `{devices}`, `{port}` and `{log_dir}` in it; the
            script and its arguments follow.
    """

    def __init__(self, loads: str, are_several: bool = False, command: str | None = None):
        self.loads, self.command = loads, command
        self.forks_all = are_several and command is None and not devices()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._ends: Path | None = None
        self._size = 0
        self._terminated: set[int] | None = None
        """Workers that got SIGTERM; None: no end was requested."""

    def start(
        self,
        script: str,
        arguments: Sequence[str],
        num_processes: int,
        log_dir: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Start a job; the one before has ended."""
        self._ends = log_dir / ENDS if self.forks_all else None
        self._size, self._terminated = num_processes, None
        if self.forks_all and self._process and self._process.poll() is None and self._pipe is not None:
            job = [dict(environment), str(num_processes), str(free_port()), str(log_dir), script, *arguments]
            os.write(self._pipe, (json_text(job) + "\n").encode())
            return
        self.close()
        more, passed = {}, list[int]()
        if self.forks_all:
            further, self._pipe = os.pipe()
            more, passed = {JOBS: str(further)}, [further]
        path = f"{BIN}:{os.environ.get('PATH', '')}"
        self._process = subprocess.Popen(
            [*self._starter(num_processes, log_dir), script, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={MALLOC: FAST_MALLOC, **os.environ, **environment, **more, "PATH": path, LAUNCHER: str(os.getpid())},
            preexec_fn=partial(end_with_parent, os.getpid()),
            pass_fds=passed,
        )
        for number in passed:
            os.close(number)

    def _starter(self, num_processes: int, log_dir: Path) -> list[str]:
        if self.command is None:
            return _starter(num_processes, log_dir, self.loads)
        values = {"devices": str(num_processes), "port": str(free_port()), "log_dir": str(log_dir)}
        return [
            re.sub(r"\{(devices|port|log_dir)\}", lambda found: values[found[1]], word)
            for word in shlex.split(self.command)
        ]

    def has_ended(self) -> bool:
        """Whether the job has ended."""
        assert self._process
        if self._terminated is not None and len(self._terminated) < self._size:
            self._terminate_new()
        return self._process.poll() is not None or (self._ends is not None and self._ends.exists())

    def wait(self) -> tuple[int, list[tuple[int, int]]]:
        """Wait for the end of the job. Returns the exit code, and `Ended.ends`."""
        assert self._process
        while self._ends is not None and not self.has_ended():
            time.sleep(LOOK_EVERY_S)
        if self._ends is None or not self._ends.exists():
            return self._process.wait(), []
        found = json.loads(self._ends.read_text(encoding="utf-8"))
        return found["code"], [(rank, status) for rank, status in found["ends"]]

    def terminate_workers(self) -> None:
        """Pass SIGTERM on to the workers, which stop gracefully; their launcher would kill them. Those that it has not
        started yet get it later, from `has_ended`."""
        self._terminated = set()
        self._terminate_new()

    def _terminate_new(self) -> None:
        assert self._process and self._terminated is not None
        job = self._process.pid
        forks = self.command is None and not devices()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just exited
            for pid in map(int, Path(f"/proc/{job}/task/{job}/children").read_text().split()):
                if pid in self._terminated:
                    continue
                name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
                if not forks or name.startswith("rank "):  # not a command that runs while MindSpore is loaded
                    os.kill(pid, signal.SIGTERM)
                    self._terminated.add(pid)

    def interrupt(self) -> None:
        """End the workers after a Ctrl-C."""
        assert self._process
        self._process.send_signal(signal.SIGINT)  # it ends its workers
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def close(self) -> None:
        """End the process that starts the workers; all jobs have ended."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        if self._process:
            self._process.wait()
            self._process = None

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind and self._process and not self.has_ended():
            self._process.kill()  # its workers end with it
        self.close()


def run_job(
    jobs: Jobs,
    script: str,
    arguments: Sequence[str],
    num_processes: int,
    log_dir: Path,
    shown_rank: int,
    is_read: bool = True,
    environment: Mapping[str, str] = {},
    look: Callable[[], object] = lambda: None,
) -> Ended:
    """Run one job as `launch` does. `look` is called from time to time while it runs."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for old in (*log_dir.glob("worker_*.log"), *log_dir.glob(ENDS)):
        old.unlink()
    jobs.start(script, arguments, num_processes, log_dir, environment)
    before = signal.getsignal(signal.SIGTERM)

    def stop(number: int, frame: Any) -> None:
        jobs.terminate_workers()
        if callable(before):
            before(number, frame)

    def has_ended() -> bool:
        look()
        return jobs.has_ended()

    signal.signal(signal.SIGTERM, stop)
    shown = log_dir / f"worker_{shown_rank}.log"
    try:
        _show(shown, has_ended, is_read)
        code, ends = jobs.wait()
    except KeyboardInterrupt:
        jobs.interrupt()
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    said = shown.read_text(encoding="utf-8", errors="replace") if shown.exists() else ""
    return Ended(code, ends, log_dir, said)


def _starter(num_processes: int, log_dir: Path, loads: str) -> list[str]:
    """The command that starts the workers: msrun on devices, else `fork.py`, which loads MindSpore once."""
    if not devices():
        return [sys.executable, FORK, loads, str(num_processes), str(free_port()), str(log_dir)]
    return [
        str(BIN / "msrun"),
        f"--worker_num={num_processes}",
        f"--local_worker_num={num_processes}",
        "--join=True",
        f"--master_port={free_port()}",
        f"--log_dir={log_dir}",
        f"--tail_worker_log={num_processes}",  # of no rank: the log of the shown rank is read here
    ]


def _show(log: Path, has_ended: Callable[[], bool], is_read: bool) -> None:
    """Print a worker's log until the job has ended.

    A log contains both streams of a worker; milestones, errors and progress bars are printed to stderr, as without msrun.
    """
    in_progress_bar = False
    rest = b""
    for piece in _growing(log, has_ended):
        *lines, rest = re.split(rb"(?<=[\r\n])", rest + piece)
        for line in lines:
            is_bar, in_progress_bar = in_progress_bar or line.endswith(b"\r"), line.endswith(b"\r")
            _write(sys.stderr if is_bar or line.startswith(TOLD) else sys.stdout, line, is_read)
        if rest and not any(mark.startswith(rest[: len(mark)]) for mark in TOLD) and not in_progress_bar:
            _write(sys.stdout, rest, is_read)  # generated text is printed token by token
            rest = b""
    _write(sys.stderr if in_progress_bar or rest.startswith(TOLD) else sys.stdout, rest, is_read)


def _write(stream: TextIO, text: bytes, is_read: bool) -> None:
    try:
        stream.buffer.write(text)
        stream.buffer.flush()
    except BrokenPipeError:
        if is_read:
            raise
        silence(stream)


def _growing(path: Path, has_ended: Callable[[], bool]) -> Iterator[bytes]:
    """Content appended to a file, until the job has ended."""
    while not path.exists():
        if has_ended():
            return
        time.sleep(LOOK_EVERY_S)
    with path.open("rb", buffering=0) as file:
        while True:
            is_last = has_ended()  # evaluated first, so that output written meanwhile is still read
            while piece := file.read(1 << 16):
                yield piece
            if is_last:
                return
            time.sleep(LOOK_EVERY_S)


def failure_report(log_dir: Path) -> str:
    """The lines of the workers' logs that report the cause of a failure, a lost rank first."""
    gone, errors = [], []
    for log in sorted(log_dir.glob("worker_*.log")):
        text = log.read_text(encoding="utf-8", errors="replace")
        gone += re.findall(r"^rank \d+: rank \d+ is gone.*$", text, re.M)
        if "Traceback (most recent call last)" in text:
            errors.append((log.stat().st_mtime, log, text[text.index("Traceback (most recent call last)") :]))
        elif match := re.search(r"^error: .*(\n.*)*", text, re.M):
            errors.append((log.stat().st_mtime, log, match.group(0)))
    if errors:
        _, log, text = min(errors)
        if text.startswith("error: "):  # the user's mistake, which every rank reports
            return text.strip()
        return f"{log.stem} failed first ({log}):\n" + "\n".join(split_lines(text.strip())[:60])
    return gone[0] if gone else f"the job failed; see the logs in {log_dir}"
