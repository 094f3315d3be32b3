# SPDX-License-Identifier: Apache-2.0
"""The settings that a run really uses, defaults included: config.json of its folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.parallel.report import Report
from sporeloom.train.config import Run
from sporeloom.train.saving import versions
from sporeloom.train.state import SCHEDULE


def settings_of(run: Run) -> dict[str, Any]:
    """The settings that the run really uses."""
    return {
        # A run file that repeats it, from the beginning; what it was read from is all in it.
        "train": {
            k: str(v) if isinstance(v, Path) else v
            for k, v in {**dataclasses.asdict(run.config), "resume": False, "overwrite": False}.items()
            if k != "run"
        },
        "model": run.model.to_dict(),
        "strategy": {k: v for k, v in dataclasses.asdict(run.strategy).items() if k not in ("rules", "lines")},
        "resolved": {name: getattr(run, name) for name in ("seq_len", *SCHEDULE)},
        "versions": versions(),
    }


def write_resolved(run: Run, report: Report) -> None:
    """Write the settings of the run and the shards of its parameters next to its metrics."""
    text = json_text({**settings_of(run), "parallel": report.to_dict()}, indent=2, ensure_ascii=False) + "\n"
    write_text_atomically(run.config.output_dir / "config.json", text)
