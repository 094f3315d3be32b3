# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers that a run reports its metrics to; their packages are imported where they are used."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from sporeloom.core.lines import first_line
from sporeloom.core.log import milestone

TrackerName = Literal["wandb", "mlflow", "swanlab", "trackio"]
MLFLOW_TAG = "sporeloom.run"
MLFLOW_PARAMS, MLFLOW_VALUE = 100, 500
"""Maximum number of parameters in one call, and of characters in a value, for every store of MLflow."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers name it."""

    project: str
    name: str
    id: str
    """Random name that a resumed run keeps."""
    folder: Path
    settings: Mapping[str, Any]
    """Nested settings of the run, as JSON data."""
    steps_done: int = 0


class Tracker(ABC):
    """A run of a tracker, begun when it is created."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    @abstractmethod
    def finish(self, has_failed: bool) -> None:
        """End the run."""


class Wandb(Tracker):
    """A run of Weights & Biases."""

    def __init__(self, run: TrackedRun):
        import wandb  # noqa: PLC0415 (optional)

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))


class MLflow(Tracker):
    """A run of MLflow; a resumed run is found by its tag."""

    def __init__(self, run: TrackedRun):
        # All ranks wait for the one that reports: a server that does not answer may cost seconds, not minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        import mlflow  # noqa: PLC0415 (optional)

        self._mlflow = mlflow
        experiment = mlflow.set_experiment(run.project)
        found = mlflow.MlflowClient().search_runs([experiment.experiment_id], f"tags.`{MLFLOW_TAG}` = '{run.id}'")
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
            return
        mlflow.start_run(run_name=run.name, tags={MLFLOW_TAG: run.id})
        settings = ((name, str(value)[:MLFLOW_VALUE]) for name, value in flattened(run.settings))
        while batch := dict(islice(settings, MLFLOW_PARAMS)):
            mlflow.log_params(batch)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self, has_failed: bool) -> None:
        self._mlflow.end_run("FAILED" if has_failed else "FINISHED")


class SwanLab(Tracker):
    """A run of SwanLab."""

    def __init__(self, run: TrackedRun):
        import swanlab  # noqa: PLC0415 (optional)

        self._swanlab = swanlab
        swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=str(run.folder / "swanlog"),
            config=dict(run.settings),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._swanlab.log(dict(values), step=step)

    def finish(self, has_failed: bool) -> None:
        self._swanlab.finish(state="crashed" if has_failed else "success")


class Trackio(Tracker):
    """A run of Trackio, which names runs by their name alone."""

    def __init__(self, run: TrackedRun):
        import trackio  # noqa: PLC0415 (optional)

        self._trackio = trackio
        name = f"{run.name}-{run.id}"
        trackio.init(project=run.project, name=name, resume="allow", config=dict(run.settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def finish(self, has_failed: bool) -> None:
        self._trackio.finish()


TRACKERS: dict[TrackerName, type[Tracker]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
    "swanlab": SwanLab,
    "trackio": Trackio,
}
"""Trackers by the name of their package."""


class GuardedTracker(Tracker):
    """A tracker whose failures are logged once and end nothing but the tracking."""

    def __init__(self, name: str, begin: Callable[[], Tracker]):
        self.name = name
        self._tracker: Tracker | None = None
        self._attempt(lambda: setattr(self, "_tracker", begin()))

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            tracker, self._tracker = self._tracker, None
            if tracker:
                with contextlib.suppress(Exception):  # whatever can still be ended is
                    tracker.finish(has_failed=True)
            what = first_line(error) or type(error).__name__
            milestone(f"{self.name}: {what}; the run continues without it, metrics.jsonl has all metrics")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if tracker := self._tracker:
            self._attempt(lambda: tracker.log(step, values))

    def finish(self, has_failed: bool) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker:
            self._attempt(lambda: tracker.finish(has_failed))


@contextlib.contextmanager
def reporting_to(trackers: list[Tracker]) -> Iterator[list[Tracker]]:
    """End the run at each tracker after the block: as failed if the block raises."""
    try:
        yield trackers
    except BaseException:
        mark_failed(trackers)
        raise
    for tracker in trackers:
        tracker.finish(has_failed=False)


def mark_failed(trackers: list[Tracker]) -> None:
    """End the run at each tracker as one that did not reach its end."""
    while trackers:
        trackers.pop(0).finish(has_failed=True)


def open_trackers(names: Sequence[TrackerName], run: TrackedRun) -> list[Tracker]:
    """Begin the run at each tracker."""
    return [GuardedTracker(name, lambda kind=TRACKERS[name]: kind(run)) for name in names]  # type: ignore[misc]


def missing_packages(names: Sequence[TrackerName]) -> list[str]:
    """Problems: trackers whose packages are not installed."""
    return [
        f"--tracker {name}: the package is not installed: pip install -e '.[{name}]'"
        for name in names
        if importlib.util.find_spec(name) is None
    ]


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested settings, with names such as `train.steps`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
