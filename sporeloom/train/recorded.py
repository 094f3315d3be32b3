# SPDX-License-Identifier: Apache-2.0
"""Runs as their folders record them: settings, metrics, and whether they are finished."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import split_lines
from sporeloom.core.locks import is_being_written
from sporeloom.core.numbers import MAX_COUNT
from sporeloom.strategy.axes import BY_NAME
from sporeloom.train.history import METRICS, History

CONFIG, SUMMARY = "config.json", "summary.json"
Points = list[tuple[int, float]]
"""Values of a metric by step, finite ones only."""
SPLIT = ("compute_s", "communication_s", "data_s")
"""Metrics that divide the time of a step."""
MAX_VALUE = 1e300
"""Larger values are as good as infinite: their differences are."""


@dataclass(frozen=True)
class RecordedRun:
    """A training run, read from its folder."""

    folder: Path
    settings: Mapping[str, Any]
    """config.json; empty if it cannot be read."""
    lines: list[dict[str, Any]]
    """Metrics of its steps."""
    history: History | None
    status: str
    """`finished`, `running`, `stopped`, or `unknown`: another user runs or ran it."""
    began: float
    """Seconds since 1970."""

    @property
    def _train(self) -> Mapping[str, Any]:
        return _mapping(self.settings.get("train"))

    @property
    def name(self) -> str:
        return str(self._train.get("run_name") or self.folder.resolve().name)

    @property
    def model(self) -> str:
        """Family and size, the file of the model's configuration, or the checkpoint that training began with."""
        train = self._train
        if train.get("config"):
            return f"{train.get('model')} {Path(str(train['config'])).stem}"
        if train.get("from_checkpoint") or "size" not in train:
            return str(train.get("from_checkpoint") or "-")
        return f"{train.get('model')} {train['size']}"

    @property
    def mesh(self) -> str:
        """Degrees other than 1: `dp2 tp4`."""
        mesh = _mapping(_mapping(self.settings.get("strategy")).get("mesh"))
        degrees = [f"{axis}{mesh[axis]}" for axis in BY_NAME if mesh.get(axis, 1) != 1]
        return " ".join(degrees) or "1 device"

    @property
    def steps(self) -> int:
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def total_steps(self) -> int | None:
        return self._train.get("steps")

    def points(self, metric: str) -> Points:
        """Values of a metric by step."""
        return [(line["step"], float(line[metric])) for line in self.lines if _is_finite(line.get(metric))]

    def last(self, metric: str) -> float | None:
        points = self.points(metric)
        return points[-1][1] if points else None

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the steps: the first one of a process is slower."""
        values = [value for _, value in self.points("tokens_per_s")]
        return statistics.median(values) if values else None

    @property
    def time_split(self) -> tuple[float, ...] | None:
        """Shares of computation, exposed communication and data in the time of all steps; None: an earlier release ran."""
        totals = [sum(value for _, value in self.points(name)) for name in SPLIT]
        return tuple(total / sum(totals) for total in totals) if sum(totals) else None


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) < MAX_VALUE


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def find_runs(folders: Iterable[Path]) -> list[RecordedRun]:
    """Read the runs in `folders`, each the folder of a run or one that holds such folders; the oldest first.

    Raises:
        ConfigError: all folders that hold no run.
    """
    found: dict[Path, Path] = {}
    problems = []
    for folder in folders:
        inside = [folder] if _is_run(folder) else _runs_in(folder)
        if not inside:
            what = "holds no run: neither it nor a folder in it has " if folder.is_dir() else "no folder with "
            problems.append(f"{folder}: {what}{METRICS}")
        found.update((path.resolve(), path) for path in inside)
    if problems:
        raise ConfigError(problems)
    return sorted(map(_read, found.values()), key=lambda run: (run.began, run.name))


def _is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file()


def _runs_in(folder: Path) -> list[Path]:
    """Folders in a folder that are runs; out/latest is one of the others."""
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if not path.is_symlink() and _is_run(path)]


def _read(folder: Path) -> RecordedRun:
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        settings = {}
    history, metrics = History.read(folder), folder / METRICS
    began = history.first_start if history else None
    return RecordedRun(
        folder=folder,
        settings=settings if isinstance(settings, dict) else {},
        lines=_metrics(metrics),
        history=history,
        status=_status(folder),
        began=began if began is not None else metrics.stat().st_mtime,
    )


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl. The last one may be cut off: a run may be writing it.

    Raises:
        ConfigError: another line is not the metrics of a step.
    """
    try:
        lines = split_lines(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if not isinstance(values["step"], int) or abs(values["step"]) > MAX_COUNT:
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            if number == len(lines):
                break
            raise ConfigError(f"{path}:{number}: not the metrics of a step") from None
        found.append(values)
    return found


def _status(folder: Path) -> str:
    is_running = is_being_written(folder)
    if is_running or is_running is None:
        return "running" if is_running else "unknown"
    summary = folder / SUMMARY
    is_current = summary.is_file() and summary.stat().st_mtime >= (folder / METRICS).stat().st_mtime
    return "finished" if is_current else "stopped"
