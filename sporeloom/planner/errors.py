# SPDX-License-Identifier: Apache-2.0
"""Intervals of predicted step times and memory, from the errors on published runs. The figures: benchmarks/planner_errors.py
and fit_memory.py."""

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
MEMORY_ERRORS = Path(__file__).with_name("memory_errors.yaml")
GB = 2**30
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

    def describe(self, value: float) -> str:
        return "no interval known"

    def explain(self) -> str:
        return f"no interval is known: {self.why}"


@dataclass(frozen=True)
class MemoryInterval:
    """Interval of measured memory, as multiples of the predicted one."""

    low: float
    high: float
    coverage: float
    """Minimum fraction of the figures inside."""
    rows: int
    """Number of published figures."""
    publishers: int
    median_error: float
    """Median error of predicted memory, relative to the measured one."""
    bias: float
    """The same with its sign."""

    def of(self, num_bytes: float) -> tuple[float, float]:
        return self.low * num_bytes, self.high * num_bytes

    def describe(self, num_bytes: float) -> str:
        """The bounds of a predicted memory."""
        low, high = self.of(num_bytes)
        return f"{low / GB:.1f} to {high / GB:.1f} GB for {self.coverage:.0%} of {self.rows} published figures"

    def explain(self) -> str:
        """Explain the bounds."""
        return (
            f"at least {self.coverage:.0%} of {self.rows} published figures of dense models, {self.publishers} publishers "
            f"counting alike, are {self.low:.2f} to {self.high:.2f} times what is predicted without those of their publisher "
            f"(median error {self.median_error:.0%}, bias {self.bias:+.0%}); none is of MindSpore"
        )


@functools.cache
def memory_errors() -> dict[str, Any]:
    """Figures of predicted memory, by engine, and the pool of PyTorch's allocator for each byte in use."""
    return read_yaml(MEMORY_ERRORS).mapping


def memory_interval(dims: Dimensions, job: Parallelism, task: TrainedTask = PLAIN_TEXT) -> MemoryInterval | NoInterval:
    """The interval of a device's memory, or the reason why there is none."""
    if dims.num_experts:
        return NoInterval("no memory of a run with experts is published")
    if job.precision == "fp32":
        return NoInterval("none of the published figures is of a run in float32")
    if task.lora or task.name not in LIKE_PLAIN_TEXT:
        return NoInterval(
            "none of the published figures is of " + ("adapters" if task.lora else f"the task {task.name}")
        )
    if job.optimizer_on_host or any(job.offloaded_layers):
        return NoInterval("none of the published figures is of a run that uses the host's memory")
    found, one = memory_errors(), memory_errors()["engines"]["all"]
    rows, publishers = one["rows"], one["publishers"]
    return MemoryInterval(found["low"], found["high"], found["coverage"], rows, publishers, one["median"], one["bias"])


def memory_interval_values(interval: MemoryInterval | NoInterval, num_bytes: float) -> dict[str, Any]:
    """The interval of a device's memory as JSON data."""
    if isinstance(interval, NoInterval):
        return {"memory_interval_bytes": None, "memory_interval": {"meaning": interval.explain()}}
    return {
        "memory_interval_bytes": interval.of(num_bytes),
        "memory_interval": {**dataclasses.asdict(interval), "meaning": interval.explain()},
    }


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
