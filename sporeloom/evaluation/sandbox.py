# SPDX-License-Identifier: Apache-2.0
"""Run commands that nobody vouches for, without a network, bounded, leaving nothing behind. Needs Linux 5.12 or later."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sporeloom.errors import ConfigError

FOLDER = "/box"
"""Where the commands work, in the root they see."""
JAIL = Path(__file__).with_name("jail.py")
GRACE_S = 20.0  # for starting, mounting and reporting, on a busy machine
_numbers = itertools.count(os.getpid() * 1000)

BrokenLimit = Literal["time", "memory", "processes", "output"]


@dataclass(frozen=True)
class Limits:
    """Of everything a step starts, together."""

    memory_bytes: int = 1 << 30
    """Of all processes; also what one may map for itself."""
    processes: int = 64
    output_bytes: int = 1 << 20
    disk_bytes: int = 256 << 20
    """Of the folder the commands work in, which lies in memory."""


@dataclass(frozen=True)
class Step:
    """A command; the first word is an absolute path."""

    argv: Sequence[str]
    time_s: float
    """Wall-clock time, after which all its processes are killed."""


@dataclass(frozen=True)
class StepResult:
    """How a step ended."""

    code: int
    """Exit code; a signal's number, negative, for a process ended by one."""
    broken_limit: BrokenLimit | None
    seconds: float
    output: str = field(repr=False)
    """stdout and stderr together."""

    @property
    def ok(self) -> bool:
        return self.code == 0 and self.broken_limit is None


def run(
    files: Mapping[str, str],
    steps: Sequence[Step],
    limits: Limits,
    environment: Mapping[str, str] | None = None,
    needed: Sequence[str] = (),
    overlays: Mapping[str, str] | None = None,
) -> list[StepResult]:
    """Write `files` into an empty folder that vanishes afterwards and run `steps` there until one fails.

    Args:
        environment: variables of the commands, who see no others. `{folder}` in a value stands for their folder, as in
            the words of `steps`.
        needed: files and folders of the toolchain: besides the system's programs and libraries all the commands see.
        overlays: name in the folder -> a folder elsewhere whose content stands there and may be changed, to no effect.

    Raises:
        ConfigError: this machine does not let us isolate a process.
    """
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8"}
    variables |= {name: value.replace("{folder}", FOLDER) for name, value in (environment or {}).items()}
    job = {
        "caller": os.getpid(),
        "number": next(_numbers) % 1_000_000_000,
        "folder": FOLDER,
        "files": dict(files),
        "steps": [{**asdict(s), "argv": [word.replace("{folder}", FOLDER) for word in s.argv]} for s in steps],
        "limits": asdict(limits),
        "environment": variables,
        "needed": [*needed, *(overlays or {}).values()],
        "overlays": dict(overlays or {}),
    }
    results = _run_jail(job, sum(step.time_s for step in steps) + GRACE_S)
    return [StepResult(**result) for result in results]


def check_isolation() -> None:
    """Find out whether this machine lets us isolate a process.

    Raises:
        ConfigError: it does not.
    """
    run({}, [Step(["/bin/true"], 10.0)], Limits())


def _run_jail(job: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(JAIL)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(json.dumps(job).encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the isolated process did not report within {timeout_s:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        report = json.loads(output)
    except ValueError:
        raise RuntimeError(f"the isolated process failed: {errors.decode(errors='replace').strip()}") from None
    if isinstance(report, dict):
        raise ConfigError(
            f"programs cannot be isolated here: {report['refused']}; run as root, or allow unprivileged user "
            "namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
        )
    results: list[dict[str, Any]] = report
    return results
