# SPDX-License-Identifier: Apache-2.0
"""A process with limits on time and memory for computations from somebody else's file: its templates and patterns.

It starts with the first question, answers one line of JSON with another, and another one takes its place when a question has
ended it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sporeloom.core.errors import ConfigError

CPU_SECONDS = 1.0
WALL_SECONDS = 60.0
"""Seconds to wait on a machine that is busy with other things; a request itself is limited by processor time."""
MEMORY_BYTES = 1 << 30
START = "import sys; sys.path[:] = sys.argv[1:]; from {} import main; main()"
MAX_MESSAGE = 300


class BoundedProcess:
    """Sends requests to one process, from any thread.

    Args:
        worker: the module whose `main` answers by `serve`.
        work: what it does, for messages: `to render`.
    """

    def __init__(self, worker: str, work: str):
        self._start, self._work = START.format(worker), work
        os.register_at_fork(after_in_child=self.forget)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a request and return the answer of the process.

        Raises:
            ConfigError: the question is refused, or takes too much.
        """
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            process = self._running()
            try:
                assert process.stdin
                process.stdin.write(line)
                process.stdin.flush()
                answer = _read_line(process)
            except BrokenPipeError:
                answer = b""
            except BaseException:
                self._end()
                raise
            if not answer.endswith(b"\n"):
                raise ConfigError(self._why_ended())
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise ConfigError(found["error"].partition("\n")[0][:MAX_MESSAGE])
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", self._start, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def _why_ended(self) -> str:
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.poll()
        self._end()
        if code in (-signal.SIGPROF, None):
            return f"it takes more than {CPU_SECONDS:g} s {self._work}"
        return f"the process that started {self._work} ended (exit code {code})"

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._close()

    def forget(self) -> None:
        """After a fork: the other process belongs to the parent, and ends when that closes its pipes."""
        self._lock = threading.Lock()
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout) if self._process else ():
            with contextlib.suppress(BrokenPipeError):
                pipe.close() if pipe else None
        self._process = None


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    """Read a line of its output, or the rest when it ended or the time was over."""
    assert process.stdout
    deadline, parts = time.monotonic() + WALL_SECONDS, list[bytes]()
    waiting = select.poll()
    waiting.register(process.stdout, select.POLLIN | select.POLLHUP)
    while not parts or not parts[-1].endswith(b"\n"):
        if not waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
            break
        part = os.read(process.stdout.fileno(), 1 << 20)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def serve(answer: Callable[[bytes], dict[str, Any]]) -> None:
    """In the other process: answer lines until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; this process ends with its input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the one that started this does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for line in sys.stdin.buffer:
        # Ends the process, whatever it is doing: an expression may be one long call.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = json.dumps(answer(line)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()
