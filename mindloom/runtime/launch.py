# SPDX-License-Identifier: Apache-2.0
"""Start msrun for a script on this machine, and tell in one breath what went wrong when a worker fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from mindloom.errors import EXIT_BAD_INPUT
from mindloom.log import MARK

MILESTONE = MARK.encode()
STOPPED = 128 + signal.SIGTERM
"""Exit code of a job that was told to stop and did so in good order."""
STOPPED_MARK = f"{MARK}stopped after step "


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(script: str, arguments: Sequence[str], num_processes: int, log_dir: Path, shown_rank: int) -> int:
    """Run `script` in `num_processes` workers under msrun; show what `shown_rank` prints. Returns the exit code.

    The logs of all workers are in `log_dir`. After a failure the first failing rank's last lines are shown.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    for old in log_dir.glob("worker_*.log"):
        old.unlink()
    msrun = Path(sys.executable).with_name("msrun")
    command = [
        str(msrun),
        f"--worker_num={num_processes}",
        f"--local_worker_num={num_processes}",
        "--join=True",
        f"--master_port={free_port()}",
        f"--log_dir={log_dir}",
        f"--tail_worker_log={shown_rank}",
        script,
        *arguments,
    ]
    environment = {**os.environ, "PATH": f"{msrun.parent}:{os.environ.get('PATH', '')}"}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: _terminate_workers(job.pid))
    output = job.stdout
    assert output is not None
    try:
        in_progress_bar = was_told = False
        for line in iter(lambda: _read_piece(output), b""):
            if line.startswith((b"Start worker process", b"Start scheduler process")):  # msrun's own chatter
                continue
            # msrun mixes a worker's two streams; milestones and progress bars belong on stderr, as without msrun
            is_bar, in_progress_bar = in_progress_bar or line.endswith(b"\r"), line.endswith(b"\r")
            stream = sys.stderr if is_bar or line.startswith(MILESTONE) else sys.stdout
            was_told = was_told or STOPPED_MARK.encode() in line
            stream.buffer.write(line)
            stream.buffer.flush()
        code = job.wait()
    except KeyboardInterrupt:
        job.send_signal(signal.SIGINT)  # msrun ends its workers
        try:
            job.wait(timeout=20)
        except subprocess.TimeoutExpired:
            job.kill()
        raise
    if not code:
        return 0
    log = log_dir / f"worker_{shown_rank}.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if stopped := re.search(rf"{re.escape(STOPPED_MARK)}.*", text):
        if not was_told:  # msrun stops reading the log as soon as one worker has ended
            print(stopped.group(0), file=sys.stderr)
        return STOPPED
    report = failure_report(log_dir)
    print(report, file=sys.stderr)
    return EXIT_BAD_INPUT if report.startswith("error: ") else 1


def _terminate_workers(msrun_pid: int) -> None:
    """Pass SIGTERM on to the workers, who end in good order; msrun would end them at once."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended by itself
        for pid in Path(f"/proc/{msrun_pid}/task/{msrun_pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGTERM)


def _read_piece(stream: IO[bytes]) -> bytes:
    """The next line; a progress bar's carriage return ends one too."""
    piece = bytearray()
    while byte := stream.read(1):
        piece += byte
        if byte in b"\r\n":
            break
    return bytes(piece)


def failure_report(log_dir: Path) -> str:
    """The lines of the workers' logs that say what went wrong, the rank that was lost first."""
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
        if text.startswith("error: "):  # the user's mistake; every rank says the same
            return text.strip()
        return f"{log.stem} failed first ({log}):\n" + "\n".join(text.strip().splitlines()[:60])
    return gone[0] if gone else f"the job failed; see the logs in {log_dir}"
