# SPDX-License-Identifier: Apache-2.0
"""Run untrusted commands without a network, with limits, leaving nothing behind. Needs Linux 5.12 or later."""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sporeloom.core.errors import ConfigError

FOLDER = "/box"
"""Working folder of the commands, in the root they see."""
JAIL = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from sporeloom.evaluation import jail; jail.main()"
MAX_LINKS = 40
GRACE_S = 60.0  # for starting, mounting and reporting, on a busy machine
_numbers = itertools.count(os.getpid() * 1000)

BrokenLimit = Literal["time", "memory", "processes", "output"]


@dataclass(frozen=True)
class Limits:
    """Limits of everything that a step starts, together."""

    memory_bytes: int = 1 << 30
    """Memory of all processes; also the maximum that one may map for itself."""
    processes: int = 64
    output_bytes: int = 1 << 20
    disk_bytes: int = 256 << 20
    """Size of the folder the commands work in, which is in memory."""


@dataclass(frozen=True)
class Step:
    """A command; the first word is an absolute path."""

    argv: Sequence[str]
    time_s: float
    """Wall-clock time, after which all its processes are killed."""
    channel: Sequence[int] = ()
    """File descriptors that it uses to communicate with another program, see `run`."""
    wait_s: float = 0.0
    """Seconds that the start, and with it the time limit, waits for input on its channel."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step."""

    code: int
    """Exit code; a signal's number, negative, for a process ended by one."""
    broken_limit: BrokenLimit | None
    seconds: float
    output: str = field(repr=False)
    """stdout and stderr together."""

    @property
    def ok(self) -> bool:
        return self.code == 0 and self.broken_limit is None


@dataclass(frozen=True)
class Job:
    """The steps of one sandbox: an empty folder with some files, which is removed afterwards."""

    files: Mapping[str, str | bytes]
    steps: Sequence[Step]
    """Commands that run until one fails. `{folder}` in a word stands for the folder."""
    limits: Limits
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the commands, which see no others; `{folder}` likewise."""
    needed: Sequence[str] = ()
    """Files and folders of the toolchain: the commands see these, besides the system's programs and libraries."""
    overlays: Mapping[str, str] = field(default_factory=dict)
    """Name in the folder -> a folder elsewhere whose content stands there and may be changed, to no effect."""
    channel: Sequence[int] = ()
    """File descriptors that the steps with a `channel` communicate with; `run_job` closes them."""
    keep: Sequence[str] = ()
    """Names, or patterns of names, of the files that are returned."""


def run(
    files: Mapping[str, str | bytes],
    steps: Sequence[Step],
    limits: Limits,
    environment: Mapping[str, str] | None = None,
    needed: Sequence[str] = (),
    overlays: Mapping[str, str] | None = None,
) -> list[StepResult]:
    """Run the steps of a job, see `Job`. Returns their results.

    Raises:
        ConfigError: this machine does not let us isolate a process.
    """
    return run_job(Job(files, steps, limits, environment or {}, needed, overlays or {}))[0]


def run_job(job: Job) -> tuple[list[StepResult], dict[str, bytes]]:
    """Results of the steps, and the files that are kept.

    Raises:
        ConfigError: this machine does not let us isolate a process.
    """
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8"}
    variables |= {name: value.replace("{folder}", FOLDER) for name, value in job.environment.items()}
    contents = {
        name: content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        for name, content in job.files.items()
    }
    description = {
        "caller": os.getpid(),
        "number": next(_numbers) % 1_000_000_000,
        "folder": FOLDER,
        "files": {name: base64.b64encode(content).decode() for name, content in contents.items()},
        "steps": [{**asdict(s), "argv": [word.replace("{folder}", FOLDER) for word in s.argv]} for s in job.steps],
        "limits": asdict(job.limits),
        "environment": variables,
        "needed": [name for path in (*job.needed, *job.overlays.values()) for name in _links(path)],
        "overlays": dict(job.overlays),
        "channel": list(job.channel),
        "keep": list(job.keep),
    }
    report = _run_jail(description, sum(step.time_s + step.wait_s for step in job.steps) + GRACE_S)
    kept = {name: base64.b64decode(content) for name, content in report["files"].items()}
    return [StepResult(**result) for result in report["steps"]], kept


def _links(path: str) -> list[str]:
    """A path and what it leads to, link by link: a virtual environment may be a link, and its name must hold inside, too."""
    found = [path]
    while os.path.islink(path) and len(found) < MAX_LINKS:
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        found.append(path)
    return found


def check_isolation() -> None:
    """Check whether this machine can isolate a process.

    Raises:
        ConfigError: it does not.
    """
    run({}, [Step(["/bin/true"], 10.0)], Limits())


def _run_jail(job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", JAIL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=job["channel"],
        )
    finally:
        for handle in job["channel"]:
            os.close(handle)
    broken: BrokenLimit | None = None
    output, errors = b"", b""
    try:
        output, errors = process.communicate(json.dumps(job).encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        broken = "time"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if not broken and process.returncode == -signal.SIGKILL:
        broken = "memory"  # nobody but the kernel ends it, where the machine has none left
    if broken:
        ended = {"code": -9, "broken_limit": broken, "seconds": time.monotonic() - start, "output": ""}
        return {"steps": [ended], "files": {}}
    try:
        report: dict[str, Any] = json.loads(output)
    except ValueError:
        raise RuntimeError(f"the isolated process failed: {errors.decode(errors='replace').strip()}") from None
    if "refused" in report:
        raise ConfigError(
            f"programs cannot be isolated here: {report['refused']}; run as root, or allow unprivileged user "
            "namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
        )
    return report
