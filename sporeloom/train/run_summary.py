# SPDX-License-Identifier: Apache-2.0
"""Time of a run by activity, its throughput and its memory: a line at its end, and summary.json."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mindspore as ms

from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.trace import TRACE, now
from sporeloom.train.utilization import StepFlops, Utilization

Activity = Literal["compile", "data", "compute", "communication", "validation", "evaluation", "checkpoint"]
FILE = "summary.json"
RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in the unit of ru_maxrss."""
BYTES_IN_MIB = 1 << 20


@dataclass
class RunTimes:
    """Seconds that this process has spent on each activity since the run began; the rest is `other`."""

    began: float = field(default_factory=time.perf_counter)
    seconds: dict[Activity, float] = field(default_factory=dict)
    tokens: int = 0
    """Tokens of all steps of this process, those of all devices together."""
    flops: StepFlops | None = StepFlops(0.0, 0.0)
    """FLOPs of all these steps on a device; None: not all are counted."""
    steps: int = 0

    @contextlib.contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Add the time of the block to an activity."""
        begin, traced = time.perf_counter(), now()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + time.perf_counter() - begin
            TRACE.add("loop", activity, traced)

    @contextlib.contextmanager
    def measure_step(self, communicated: Callable[[], float | None]) -> Iterator[None]:
        """Add the time of a step to `compute`, without the time in which it communicates and does not compute.

        Args:
            communicated: seconds of communication so far; None: unknown, so that it counts as computation.
        """
        before = communicated()
        with self.measure("compute"):
            yield
        after = communicated()
        if before is not None and after is not None:
            self.seconds["communication"] = self.seconds.get("communication", 0.0) + after - before
            self.seconds["compute"] -= after - before

    def since(self, earlier: Mapping[Activity, float]) -> dict[str, float]:
        """Seconds of a step by activity, from `seconds` as they were before it. Keys are those of metrics."""
        activities: tuple[Activity, ...] = ("compute", "communication", "data")
        spent = {
            f"{name}_s": self.seconds[name] - earlier.get(name, 0.0) for name in activities if name in self.seconds
        }
        return {name: round(seconds, 6) for name, seconds in spent.items()}

    def add_step(self, tokens: int, flops: StepFlops | None) -> None:
        """Count a step."""
        self.steps += 1
        self.tokens += tokens
        self.flops = self.flops + flops if self.flops and flops else None

    def summary(self, utilization: Utilization) -> dict[str, Any]:
        """Values of summary.json: times in seconds, and throughput while computing."""
        total = time.perf_counter() - self.began
        split = {name: round(seconds, 3) for name, seconds in self.seconds.items()}
        computing = self.seconds.get("compute", 0.0) + self.seconds.get("communication", 0.0)
        rates = utilization.rates(self.tokens, self.flops, computing) if computing else {}
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "total_s": round(total, 3),
            "time_s": {**split, "other": round(total - sum(self.seconds.values()), 3)},
            "tokens_per_s": round(self.tokens / computing, 3) if computing else None,
            **{name: float(f"{value:.6g}") for name, value in rates.items()},
        }


@dataclass(frozen=True)
class PeakMemory:
    """The most memory that processes have had in use, in MiB: ranks compare 32-bit integers on devices."""

    host: int
    device: int
    """The part in the memory pool of MindSpore; 0 on CPUs."""

    @classmethod
    def of_process(cls) -> PeakMemory:
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
        device: int = ms.runtime.max_memory_allocated()
        return cls(host // BYTES_IN_MIB, device // BYTES_IN_MIB)

    def over_ranks(self, engine: Engine) -> dict[str, int]:
        """Values of summary.json: memory of the largest process and of all, in bytes. All ranks take part."""
        found = {
            "peak_memory_bytes": engine.max_over_ranks(self.host),
            "total_memory_bytes": round(engine.sum_over_ranks(self.host)),
            "peak_device_memory_bytes": engine.max_over_ranks(self.device),
        }
        return {name: mib * BYTES_IN_MIB for name, mib in found.items() if mib}


def describe(summary: dict[str, Any]) -> str:
    """One line for the log."""
    total, split = summary["total_s"], summary["time_s"]
    parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in split.items())
    told = (f"{total:,.1f} s: {parts}", ", ".join(_rates(summary)), ", ".join(_more(summary)))
    return "; ".join(filter(None, told))


def _rates(summary: dict[str, Any]) -> Iterator[str]:
    """Throughput in words, for all devices and for each."""
    if summary["tokens_per_s"] is None:
        return
    yield f"{summary['tokens_per_s']:,.0f} tokens/s while computing"
    if (each := summary["tokens_per_s_per_device"]) < 0.75 * summary["tokens_per_s"]:  # more than one
        yield f"{each:,.0f} of each device"
    if flops := summary.get("flops_per_s_per_device"):
        yield f"{_with_unit(flops)}FLOP/s of each device"
    if "mfu" in summary:
        yield f"MFU {summary['mfu']:.1%}"
        yield f"HFU {summary['hfu']:.1%}"


def _more(summary: dict[str, Any]) -> Iterator[str]:
    """Goodput and memory in words."""
    if (goodput := summary.get("goodput")) is not None:
        restarts = f" over {summary['starts']} starts" if summary["starts"] > 1 else ""
        yield f"goodput {goodput:.0%}{restarts}"
    if device := summary.get("peak_device_memory_bytes"):
        yield f"{device / 1e9:.2f} GB on the fullest device"
    yield f"{summary['peak_memory_bytes'] / 1e9:.2f} GB in the largest process"


def _with_unit(value: float) -> str:
    """Three digits and a prefix: `41.3 T`."""
    for prefix, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= unit:
            return f"{value / unit:.3g} {prefix}"
    return f"{value:.3g} "


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write summary.json of a run."""
    write_text_atomically(folder / FILE, json_text(summary, indent=2) + "\n")
