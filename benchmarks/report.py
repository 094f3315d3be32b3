# SPDX-License-Identifier: Apache-2.0
"""The head that results share: what was measured, when, on what, by which command."""

import os
import platform
from datetime import date
from pathlib import Path


def write_report(path: Path, title: str, script: str, lines: list[str]) -> None:
    machine = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}"
    head = [f"# {title}", "", f"{date.today()}, {machine}. `python benchmarks/{script}`", ""]
    path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
