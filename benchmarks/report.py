# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: running our tools, reading their metrics, the head of a result."""

import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

from sporeloom.core.lines import file_lines

ROOT = Path(__file__).resolve().parents[1]


def sporeloom(*arguments, **environment):
    """What a command prints, in this environment and what is given; ends this program where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "sporeloom", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def metrics(folder):
    return [json.loads(line) for line in file_lines(folder / "metrics.jsonl")]


def write_report(path: Path, title: str, script: str, lines: list[str]) -> None:
    machine = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}"
    head = [f"# {title}", "", f"{date.today()}, {machine}. `python benchmarks/{script}`", ""]
    path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
