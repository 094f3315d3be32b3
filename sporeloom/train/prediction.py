# SPDX-License-Identifier: Apache-2.0
"""Predicted time and memory of a step, from a report of `sporeloom dry-run --time --json`, next to what is measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.reader import read_json
from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import num_parameters
from sporeloom.strategy.config import Strategy

LEFT_OUT, MIN_STEPS = 2, 5
"""Number of first steps that are slower than the others, and of steps behind which a median is compared."""


@dataclass(frozen=True)
class Prediction:
    """A step as a dry run predicts it."""

    chip: str
    """Chip of the devices that the prediction is for."""
    step_time_s: float
    interval_s: tuple[float, float] | None
    """Bounds of the measured time; None: no interval is known."""
    meaning: str
    """Explanation of the interval, or why there is none."""
    memory_bytes: int | None = None
    """Largest memory pool of a rank; None: the dry run was without --memory, or not of all stages."""


def read_prediction(path: Path, job: Mapping[str, Any]) -> Prediction:
    """Read the report of a dry run of a job.

    Args:
        job: what the run is, by the keys of the report's `job` (`job_of_run`).

    Raises:
        ConfigError: not such a report, or that of another job: everything that differs.
    """
    values = read_json(path).value
    try:
        time, of_job, ranks = values["time"], values["job"], values["ranks"]
        chip, seconds, bounds = str(time["chip"]), float(time["seconds"]), time["step_time_interval_s"]
        interval = None if bounds is None else (float(bounds[0]), float(bounds[1]))
        meaning, given = str(time["interval"]["meaning"]), {name: of_job.get(name) for name in job}
        pools = {rank["stage"]: int(rank["memory"]["pool_bytes"]) for rank in ranks if "memory" in rank}
        num_stages = len(of_job["stages"])
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"--predicted {path}: not a report with the time of a step; write one with `sporeloom dry-run --time "
            "--cluster NAME --json`"
        ) from None
    if wrong := list(_differences(path, given, job)):
        raise ConfigError(wrong)
    if not seconds > 0:
        raise ConfigError(f"--predicted {path}: time.seconds is {seconds:g}, which must be positive")
    memory = max(pools.values()) if len(pools) == num_stages else None
    return Prediction(chip, seconds, interval, meaning, memory)


def job_of_run(
    task: str, model: ModelConfig, strategy: Strategy, sizes: tuple[int, int], num_microbatches: int, num_adapters: int
) -> dict[str, Any]:
    """A run by the keys that the report of a dry run has. `sizes`: sequences of a step, and their length."""
    return {
        "task": task,
        "num_parameters": num_parameters(model),
        "num_adapter_parameters": num_adapters,
        "compute_dtype": model.compute_dtype,
        "mesh": str(strategy.mesh),
        "batch_size": sizes[0],
        "seq_len": sizes[1],
        "num_microbatches": num_microbatches,
        "virtual_stages": strategy.pipeline.virtual_stages,
        "schedule": strategy.pipeline.schedule,
    }


def _differences(path: Path, given: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[str]:
    for name, value in job.items():
        if given[name] != value:
            yield f"--predicted {path}: a dry run with {name} {given[name]}; that of this run is {value}"


@dataclass
class MeasuredSteps:
    """Times of steps, compared with the predicted one."""

    prediction: Prediction
    seconds: list[float] = field(default_factory=list)
    num_seen: int = 0
    is_noted: bool = False

    def add(self, seconds: float) -> str | None:
        """Add a step. Returns a note the first time that the median of the steps is outside of the interval."""
        self.num_seen += 1
        if self.num_seen > LEFT_OUT:
            self.seconds.append(seconds)
        if self.is_noted or self.prediction.interval_s is None or len(self.seconds) < MIN_STEPS:
            return None
        median, (low, high) = statistics.median(self.seconds), self.prediction.interval_s
        if low <= median <= high:
            return None
        self.is_noted = True
        return f"{self.describe(median)}, outside of {low:.3g} to {high:.3g} s: {self.prediction.meaning}"

    def describe(self, median: float) -> str:
        """Both times in words."""
        predicted, chip = self.prediction.step_time_s, self.prediction.chip
        return f"a step takes {median:.3g} s, {median / predicted:.2f} times the {predicted:.3g} s predicted on {chip}"

    def summary(self) -> dict[str, Any]:
        """Values of summary.json."""
        found: dict[str, Any] = {"predicted_step_time_s": self.prediction.step_time_s}
        if self.seconds:
            found["step_time_s"] = round(statistics.median(self.seconds), 6)
        if self.prediction.memory_bytes is not None:
            found["predicted_memory_bytes"] = self.prediction.memory_bytes
        return found

    def last_words(self) -> str | None:
        """A line for the end of the run; None: too few steps."""
        if not self.seconds:
            return None
        bounds = self.prediction.interval_s
        known = self.prediction.meaning if bounds is None else f"the interval is {bounds[0]:.3g} to {bounds[1]:.3g} s"
        return f"{self.describe(statistics.median(self.seconds))}; {known}"
