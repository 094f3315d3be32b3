# SPDX-License-Identifier: Apache-2.0
"""The process that renders chat templates, as those see it who ask it. It starts with the first question."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from sporeloom.errors import ConfigError

CPU_SECONDS = 1.0
WALL_SECONDS = 60.0
"""On a machine that is busy with other things; what bounds a template is the time of its own."""
START = "import sys; sys.path[:] = sys.argv[1:]; from sporeloom.data.template_worker import main; main()"
MAX_MESSAGE = 300


class TemplateProcess:
    """Asks one process, from any thread; another one takes its place when a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, **question: Any) -> dict[str, Any]:
        """What the process answers.

        Raises:
            ConfigError: the template cannot be read, does not take the messages, or takes too much.
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
                [sys.executable, "-I", "-c", START, *sys.path],
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
            return f"it takes more than {CPU_SECONDS:g} s to render"
        return f"rendering it ended its process (exit code {code})"

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._close()

    def forget(self) -> None:
        """In a process that was forked: the other one belongs to the parent, and ends when that closes its pipes."""
        self._lock = threading.Lock()
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout) if self._process else ():
            with contextlib.suppress(BrokenPipeError):
                pipe.close() if pipe else None
        self._process = None


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    """A line of its output, or what there was of one when it ended or the time was over."""
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


RENDERER = TemplateProcess()
"""Of this process."""
os.register_at_fork(after_in_child=RENDERER.forget)
