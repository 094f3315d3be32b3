# SPDX-License-Identifier: Apache-2.0
"""Intervals of predicted step times, from the errors on published runs. The figures: benchmarks/planner_errors.py."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sporeloom.core.log import counted
from sporeloom.core.reader import read_yaml
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask

ERRORS = Path(__file__).with_name("errors.yaml")
LIKE_PLAIN_TEXT = ("pretraining", "sft")
"""Tasks whose steps compute the same as published runs."""


@dataclass(frozen=True)
class TimeInterval:
    """Interval of measured step times, as multiples of the predicted one."""

    low: float
    high: float
    coverage: float
    """Minimum fraction of the runs inside."""
    runs: str
    """Description of these runs."""
    median_error: float
    """Median error of predicted times, relative to measured ones."""

    def of(self, seconds: float) -> tuple[float, float]:
        return self.low * seconds, self.high * seconds

    def describe(self, seconds: float) -> str:
        """The bounds of a predicted time."""
        low, high = self.of(seconds)
        return f"{low:.3g} to {high:.3g} s for {self.coverage:.0%} of runs"

    def explain(self) -> str:
        """Explain the bounds."""
        return (
            f"at least {self.coverage:.0%} of {self.runs} took {self.low:.2f} to {self.high:.2f} times what is predicted "
            f"without the runs of their publisher (median error {self.median_error:.0%})"
        )


@dataclass(frozen=True)
class NoInterval:
    """No interval: no published run is comparable with such a step."""

    why: str

    def describe(self, seconds: float) -> str:
        return "no interval known"

    def explain(self) -> str:
        return f"no interval is known: {self.why}"


@functools.cache
def published_errors() -> dict[str, Any]:
    """All figures, by kind of model and chip."""
    return read_yaml(ERRORS).mapping


def time_interval(
    dims: Dimensions, job: Parallelism, cluster: Cluster, task: TrainedTask = PLAIN_TEXT
) -> TimeInterval | NoInterval:
    """The interval of a job's step time, or the reason why there is none."""
    if cluster.efficiency or cluster.measured or (cluster.experts and dims.num_experts):
        return NoInterval("the cluster file gives efficiencies in place of those fitted on published runs")
    if cluster.unpublished:
        return NoInterval(
            f"no run on {cluster.device_name} is published; their efficiencies are those fitted on {cluster.chip}"
        )
    if job.precision == "fp32":
        return NoInterval("none of the published runs computes in float32")
    if job.schedule != "1f1b":
        return NoInterval(f"none of the published runs has the schedule {job.schedule}")
    if task.lora:
        return NoInterval("none of the published runs trains adapters alone")
    if task.name not in LIKE_PLAIN_TEXT:
        return NoInterval(f"none of the published runs is of the task {task.name}")
    if job.optimizer_on_host or any(job.offloaded_layers):
        return NoInterval("none of the published runs with a time uses the host's memory")
    errors, kind = published_errors(), "experts" if dims.num_experts else "dense"
    of_all, own = errors[kind]["all"], errors[kind].get(cluster.chip)
    models = f"{'models with experts' if dims.num_experts else 'dense models'} on plain text"
    if own and not own["joined_with_all"]:
        runs = f"{own['rows']} published runs of {models} on {cluster.chip}"
    else:
        runs = f"{of_all['rows']} published runs of {models} on all chips"
        few = f"and of the {counted(own['rows'], 'run', 'runs')}" if own else "none of them"
        publishers = counted(own["publishers"], "publisher", "publishers") if own else ""
        runs += f", {few} on {cluster.chip}{f' of {publishers}' if own else ''},"
    shown = own or of_all
    return TimeInterval(shown["low"], shown["high"], errors["coverage"], runs, shown["median"])


def interval_values(interval: TimeInterval | NoInterval, seconds: float) -> dict[str, Any]:
    """The interval of a step of `seconds` as JSON data."""
    if isinstance(interval, NoInterval):
        return {"step_time_interval_s": None, "interval": {"meaning": interval.explain()}}
    return {
        "step_time_interval_s": interval.of(seconds),
        "interval": {**dataclasses.asdict(interval), "meaning": interval.explain()},
    }
