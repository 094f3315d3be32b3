# SPDX-License-Identifier: Apache-2.0
"""Processor time and memory of the commands of each how-to page, as the page states them; written at the end of the page.

python benchmarks/docs_pages.py [PAGE ...]

Processor time, not the time on the clock: it is nearly the same on a busy machine. On two cores, commands that use both take
half of it. Memory is that of the largest process.
"""

import argparse
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/docs"))
sys.path.insert(0, str(ROOT / "tests"))
STATED = re.compile(r"\n+The commands of this page take .* process\.\n$")
LIMIT_S = 900
READY_S = 180
LEFT_S = 60


class Usage:
    """Processor seconds of all processes, and the memory of the largest one."""

    def __init__(self) -> None:
        self.seconds, self.peak_gb = 0.0, 0.0
        self._codes: dict[int, int] = {}

    def run(self, command: str, folder: Path, environment: dict[str, str]) -> int:
        """The exit code of a command."""
        return self._end(self._start(command, folder, environment))

    @contextlib.contextmanager
    def serving(self, command: str, folder: Path, environment: dict[str, str]):
        """A server, from when it can be asked until the end."""
        pid = self._start(command, folder, environment)
        deadline = time.monotonic() + READY_S
        while "is served at" not in (folder / "said.log").read_text():
            self._reap()
            assert pid not in self._codes and time.monotonic() < deadline, command
            time.sleep(0.2)
        try:
            yield
        finally:
            os.killpg(pid, signal.SIGTERM)
            self._end(pid)

    def _start(self, command: str, folder: Path, environment: dict[str, str]) -> int:
        with (folder / "said.log").open("w") as file:
            return subprocess.Popen(
                ["bash", "-c", command],
                **{"cwd": folder, "env": environment, "stdout": file, "stderr": file, "stdin": subprocess.DEVNULL},
                start_new_session=True,
            ).pid

    def _end(self, pid: int) -> int:
        deadline = time.monotonic() + LIMIT_S
        while pid not in self._codes:
            self._reap()
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.1)
        return self._codes[pid]

    def _reap(self) -> bool:
        """Count what has ended, also ranks that nobody waited for, whose parent this process becomes; whether any is left."""
        try:
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, used = found
                self._codes[pid] = os.waitstatus_to_exitcode(status)
                self.seconds += used.ru_utime + used.ru_stime
                self.peak_gb = max(self.peak_gb, used.ru_maxrss * 1024 / 1e9)
        except ChildProcessError:
            return False
        return True

    def wait_for_all(self) -> None:
        """Wait for what outlives the command that started it: the process that forks those of a dry run."""
        deadline = time.monotonic() + LEFT_S
        while self._reap():
            assert time.monotonic() < deadline, "a process does not end"
            time.sleep(0.1)


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends before them (prctl's PR_SET_CHILD_SUBREAPER)."""
    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def measure(page: str) -> Usage | None:
    """What all commands of a page take; None if one fails that the page does not show to fail."""
    from test_commands import commands, free_port  # noqa: PLC0415

    usage = Usage()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        folder, port = Path(name), str(free_port())
        for each in ("examples", "parallel_configs", "tools"):
            (folder / each).symlink_to(ROOT / each)
        (folder / "out").mkdir()
        for command, stated in commands(page):
            if command.endswith("&"):
                words = command.removesuffix("&").replace("8000", port)
                servers.enter_context(usage.serving(words, folder, environment))
                continue
            words = command.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
            code = usage.run(words, folder, environment)
            fails = command.startswith("sporeloom config diff") or any(line.startswith("error: ") for line in stated)
            if (code != 0) != fails:
                print(f"{page}: {command}\nends with {code}\n{(folder / 'said.log').read_text()[-2000:]}", flush=True)
                return None
    usage.wait_for_all()
    return usage


def spoken(seconds: float) -> str:
    if seconds < 1.5:
        return "a second"
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def spoken_size(gigabytes: float) -> str:
    return f"{gigabytes:.1f} GB" if gigabytes >= 0.1 else "less than 0.1 GB"


def main() -> None:
    from test_commands import PAGES, commands  # noqa: PLC0415

    adopt_orphans()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", default=[page for page in PAGES if page.startswith("docs/how-to/")])
    for page in parser.parse_args().pages:
        if not list(commands(page)) or (usage := measure(page)) is None:
            continue
        line = f"The commands of this page take {spoken(usage.seconds)} of processor time, and "
        line += f"{spoken_size(usage.peak_gb)} in the largest process."
        path = ROOT / page
        text = STATED.sub("\n", path.read_text(encoding="utf-8"))
        path.write_text(f"{text.rstrip()}\n\n{line}\n", encoding="utf-8")
        print(page, line, flush=True)


if __name__ == "__main__":
    main()
