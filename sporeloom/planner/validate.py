# SPDX-License-Identifier: Apache-2.0
"""Errors of the cost model's predictions on published runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sporeloom.planner.open_settings import seconds_range
from sporeloom.planner.published import Measurement, PublishedRun, UnpredictableError, describe, measured, read_rows
from sporeloom.planner.published_experts import describe_experts, is_of_experts, measured_experts, read_expert_rows
from sporeloom.planner.published_memory import RunMemory, run_memory
from sporeloom.planner.step_time import step_time


@dataclass(frozen=True)
class Prediction:
    """One row, predicted and measured."""

    run: PublishedRun
    found: Measurement
    seconds: float
    memory: RunMemory

    @property
    def time_error(self) -> float | None:
        """Error relative to the measured time."""
        return self.seconds / self.found.seconds - 1 if self.found.seconds else None

    @property
    def memory_error(self) -> float | None:
        return self.memory.shown() / self.found.memory_bytes - 1 if self.found.memory_bytes else None

    @property
    def fits(self) -> bool:
        return self.memory.needed <= self.run.cluster.usable_bytes

    @property
    def is_undecided(self) -> bool:
        """Whether it depends on what is recomputed, which is not published."""
        return not self.fits and self.memory.least <= self.run.cluster.usable_bytes


def predict(rows: list[dict[str, str]], of_experts: bool = False) -> tuple[list[Prediction], Counter[str]]:
    """Predict all rows that can be predicted, and count the others by reason. `of_experts`: of a file of runs with
    experts."""
    predictions, reasons = [], Counter[str]()
    for row in rows:
        try:
            run = describe_experts(row) if of_experts else describe(row)
            found = measured_experts(row) if of_experts else measured(row, run)
            time = step_time(run.dims, run.job, run.cluster).total
            predictions.append(Prediction(run, found, time, run_memory(run)))
        except UnpredictableError as reason:
            reasons[str(reason)] += 1
    return predictions, reasons


def _figures(errors: list[float]) -> dict[str, Any]:
    sizes = np.abs(errors)
    return {
        "rows": len(errors),
        "median_abs_error": round(float(np.median(sizes)), 4) if errors else None,
        "p90_abs_error": round(float(np.quantile(sizes, 0.9)), 4) if errors else None,
        "median_error": round(float(np.median(errors)), 4) if errors else None,
    }


def _grouped(predictions: list[Prediction], key: Any) -> dict[str, Any]:
    groups = defaultdict(list)
    for prediction in predictions:
        if prediction.time_error is not None:
            groups[key(prediction)].append(prediction.time_error)
    return {name: _figures(errors) for name, errors in sorted(groups.items(), key=lambda item: -len(item[1]))}


def _open_settings(predictions: list[Prediction]) -> dict[str, Any]:
    """Runs that leave settings open: how many were measured between the predictions of all plausible ones."""
    found = [(p.found.seconds, *seconds_range(p.run)) for p in predictions if p.run.assumed and p.found.seconds]
    return {
        "rows": len(found),
        "inside": sum(low <= measured <= high for measured, low, high in found),
        "median_ratio": round(float(np.median([high / low for _, low, high in found])), 3) if found else None,
    }


def _judged(predictions: list[Prediction]) -> dict[str, Any]:
    """Count how often "fits" or "does not fit" was right: of all runs, of those that publish all that decides memory,
    and of the others."""
    judged = [p for p in predictions if p.found.fits is not None]
    return {
        **_counts(judged),
        "all_published": _counts([p for p in judged if not p.run.assumed]),
        "partly_assumed": _counts([p for p in judged if p.run.assumed]),
        "said_not_to_fit_but_ran": [p.run.id for p in judged if p.found.fits and not (p.fits or p.is_undecided)],
        "said_to_fit_but_failed": [p.run.id for p in judged if p.fits and not p.found.fits],
        "not_judged": len(predictions) - len(judged),
    }


def _counts(judged: list[Prediction]) -> dict[str, Any]:
    confusion = Counter(
        "undecided"
        if p.is_undecided
        else ("fits" if p.fits else "does_not_fit") + ("_right" if p.fits == p.found.fits else "_wrong")
        for p in judged
    )
    right = confusion["fits_right"] + confusion["does_not_fit_right"]
    names = ("fits_right", "fits_wrong", "does_not_fit_right", "does_not_fit_wrong", "undecided")
    return {
        "rows": len(judged),
        "right": right,
        "share_right": round(right / len(judged), 4) if judged else None,
        **{name: confusion[name] for name in names},
    }


def validate(path: Path) -> dict[str, Any]:
    """Errors of step time and memory, and how often "fits" or "does not fit" was right, for a CSV of published
    runs.

    Errors are fractions of the measured value; rows that cannot be predicted are counted with the reason. Of memory all runs
    are judged: what has a time, a speed or a memory ran, so it fitted; what failed did not. Where that depends on what is
    recomputed and this is not published, it is undecided, which is not right.

    Raises:
        ConfigError: the file is not such a CSV.
    """
    of_experts = is_of_experts(path)
    predictions, reasons = predict(read_expert_rows(path) if of_experts else read_rows(path), of_experts)
    times = [p.time_error for p in predictions if p.time_error is not None]
    memories = [p.memory_error for p in predictions if p.memory_error is not None]
    return {
        "step_time": {
            **_figures(times),
            "by_source": _grouped(predictions, lambda p: p.run.source),
            "by_chip": _grouped(predictions, lambda p: p.run.cluster.chip),
            "open_settings": _open_settings(predictions),
        },
        "memory": _figures(memories),
        "fits": _judged(predictions),
        "not_predicted": dict(reasons.most_common()),
        "predicted_without_time": sum(p.time_error is None for p in predictions),
    }
