# SPDX-License-Identifier: Apache-2.0
"""Statistics of many simulated runs, and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sporeloom.simulation.faults import FaultRates
from sporeloom.simulation.job import MAX_TIME, EndlessError, Job, Outcome, runs

QUANTILES = (0.1, 0.5, 0.9)
DAY_S, HOUR_S, MINUTE_S = 86400.0, 3600.0, 60.0
PARTS = ("lost", "paused", "down", "slowed", "straggled")


@dataclass(frozen=True)
class Statistics:
    """Statistics of the runs of a job. Times in seconds."""

    goodput: float
    """Time of training without failures and checkpoints, divided by the mean time of the runs."""
    finish_s: tuple[float, float, float]
    """P10, median and P90 of the time of a run."""
    mean_s: Mapping[str, float]
    """Mean time of repeated training, of pauses for checkpoints, of restarts and repairs, of missing replicas, and of waiting
    for the slowest server."""
    interruptions: Mapping[str, float]
    """Mean number by component."""

    def as_json(self) -> dict[str, Any]:
        low, median, high = self.finish_s
        return {
            "goodput": self.goodput,
            "finish_s": {"p10": low, "median": median, "p90": high},
            **{f"{part}_s": seconds for part, seconds in self.mean_s.items()},
            "interruptions": dict(self.interruptions),
        }


def statistics(job: Job, outcomes: Iterable[Outcome]) -> Statistics:
    found = list(outcomes)
    finish = [each.finish_s for each in found]
    total = sum((each.interruptions for each in found), Counter[str]())
    low, median, high = (float(value) for value in np.quantile(finish, QUANTILES))
    return Statistics(
        goodput=float(job.work_s / np.mean(finish)),
        finish_s=(low, median, high),
        mean_s={part: float(np.mean([getattr(each, f"{part}_s") for each in found])) for part in PARTS},
        interruptions={name: count / len(found) for name, count in sorted(total.items())},
    )


def simulated(job: Job, rates: FaultRates, seed: int, number: int) -> Statistics | None:
    """Statistics of `number` runs; None: one of them makes hardly any progress."""
    try:
        return statistics(job, runs(job, rates, seed, number))
    except EndlessError:
        return None


def duration(seconds: float) -> str:
    """A time in its largest unit: `3.1 h`."""
    for unit, size in (("days", DAY_S), ("h", HOUR_S), ("min", MINUTE_S)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def table(rows: Sequence[tuple[str, Statistics | None]]) -> str:
    """A line for each policy: shares are of the mean time of a run."""
    head = ("policy", "goodput", "P10", "median", "P90", *PARTS, "interruptions")
    lines: list[tuple[str, ...]] = [head]
    for name, found in rows:
        if found is None:
            lines.append((name, f"below {1 / MAX_TIME:.0%}", *["-"] * (len(head) - 2)))
            continue
        mean = sum(found.mean_s.values()) / (1 - found.goodput) if found.goodput < 1 else 1.0
        lines.append(
            (
                name,
                f"{found.goodput:.1%}",
                *map(duration, found.finish_s),
                *(f"{found.mean_s[part] / mean:.1%}" for part in PARTS),
                f"{sum(found.interruptions.values()):.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([f"{line[0]:{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
