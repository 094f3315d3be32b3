# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a job on this machine, and reports the cause in one message when a worker fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from sporeloom.core.errors import EXIT_BAD_INPUT, ConfigError, silence
from sporeloom.core.lines import split_lines
from sporeloom.core.log import MARK
from sporeloom.core.processes import FAST_MALLOC, LAUNCHER, MALLOC, end_with_parent
from sporeloom.runtime.environment import devices
from sporeloom.strategy.mesh import Mesh

TOLD = MARK.encode(), b"error: "
"""Prefixes of lines that belong on stderr."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a job that stopped gracefully on request."""
STOPPED_MARK = f"{MARK}stopped after step "
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


def launch_verb(verb: str, argv: Sequence[str], mesh: Mesh, log_dir: Path, loads: str = ENGINE) -> int:
    """Run `sporeloom VERB` in as many processes as the mesh has ranks, and print the output of its logging rank.
    Returns the exit code."""
    if "--oversubscribe" not in argv and (problem := too_many(mesh.size)):
        raise ConfigError(problem)
    arguments = [verb, *(argument for argument in argv if argument not in ("--launch", "--oversubscribe"))]
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
    log_dir.mkdir(parents=True, exist_ok=True)
    for old in log_dir.glob("worker_*.log"):
        old.unlink()
    path = f"{BIN}:{os.environ.get('PATH', '')}"
    job = subprocess.Popen(
        [*_starter(num_processes, log_dir, loads), script, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={MALLOC: FAST_MALLOC, **os.environ, "PATH": path, LAUNCHER: str(os.getpid())},
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    before = signal.signal(signal.SIGTERM, lambda *_: _terminate_workers(job.pid))
    shown = log_dir / f"worker_{shown_rank}.log"
    try:
        _show(shown, lambda: job.poll() is not None, is_read)
        code = job.wait()
    except KeyboardInterrupt:
        job.send_signal(signal.SIGINT)  # it ends its workers
        try:
            job.wait(timeout=20)
        except subprocess.TimeoutExpired:
            job.kill()
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if not code:
        return 0
    said = shown.read_text(encoding="utf-8", errors="replace") if shown.exists() else ""
    if STOPPED_MARK in said:
        return STOPPED
    report = failure_report(log_dir)
    is_mistake = report.startswith("error: ")
    if not (is_mistake and report in said):  # a user's mistake is in every log, and was shown already
        print(report, file=sys.stderr)
    return EXIT_BAD_INPUT if is_mistake else 1


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


def _terminate_workers(job: int) -> None:
    """Pass SIGTERM on to the workers, which stop gracefully; their launcher would kill them."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just exited
        for pid in Path(f"/proc/{job}/task/{job}/children").read_text().split():
            os.kill(int(pid), signal.SIGTERM)


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
