# SPDX-License-Identifier: Apache-2.0
"""Time of a run by activity, its throughput and its memory: a line at its end, and summary.json."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text

Activity = Literal["compile", "data", "compute", "validation", "checkpoint"]
FILE = "summary.json"
RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in the unit of ru_maxrss."""


@dataclass
class RunTimes:
    """Seconds that this process has spent on each activity since the run began; the rest is `other`."""

    began: float = field(default_factory=time.perf_counter)
    seconds: dict[Activity, float] = field(default_factory=dict)
    tokens: int = 0
    """Tokens of all steps of this process, those of all devices together."""
    steps: int = 0

    @contextlib.contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Add the time of the block to an activity."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + time.perf_counter() - begin

    def summary(self, peak_memory_bytes: int) -> dict[str, Any]:
        """The values of summary.json: times in seconds, throughput while computing, memory of the largest process."""
        total = time.perf_counter() - self.began
        split = {name: round(seconds, 3) for name, seconds in self.seconds.items()}
        computing = self.seconds.get("compute", 0.0)
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "total_s": round(total, 3),
            "time_s": {**split, "other": round(total - sum(self.seconds.values()), 3)},
            "tokens_per_s": round(self.tokens / computing, 3) if computing else None,
            "goodput": round(computing / total, 4),
            "peak_memory_bytes": peak_memory_bytes,
        }


def peak_memory_bytes() -> int:
    """The most memory that this process has had in use, on the host."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def describe(summary: dict[str, Any]) -> str:
    """One line for the log."""
    total, split = summary["total_s"], summary["time_s"]
    parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in split.items())
    rate = f"{summary['tokens_per_s']:,.0f} tokens/s while computing, " if summary["tokens_per_s"] else ""
    return f"{total:,.1f} s: {parts}; {rate}{summary['peak_memory_bytes'] / 1e9:.2f} GB in the largest process"


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write summary.json of a run."""
    write_text_atomically(folder / FILE, json_text(summary, indent=2) + "\n")
