# SPDX-License-Identifier: Apache-2.0
"""Runs as a table and a plot of plain text."""

from __future__ import annotations

import string
import time
from collections.abc import Sequence

from sporeloom.core.errors import without_control
from sporeloom.train.recorded import Points, RecordedRun

MARKS = string.ascii_letters
"""Marks of the newest runs, which the plot has."""
OVERLAP = "*"
WIDTH, HEIGHT = 72, 16
SPLIT_HEAD = "comp/comm/data"
"""Heading of the shares of computation, exposed communication and data in the time of steps."""
HEAD = ("", "run", "model", "mesh", "steps", "loss", "validation", "tokens/s", SPLIT_HEAD, "status", "started")
NUMBERS = ("steps", "loss", "validation", "tokens/s", SPLIT_HEAD)
"""Columns that are aligned at the right."""


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def cells(run: RecordedRun) -> tuple[str, ...]:
    """The columns of a run, without its mark."""
    steps = f"{run.steps}" if run.total_steps in (None, run.steps) else f"{run.steps} of {run.total_steps}"
    return (
        without_control(run.name),
        without_control(run.model),
        without_control(run.mesh),
        steps,
        number(run.last("loss"), ".4f"),
        number(run.last("validation/loss"), ".4f"),
        number(run.tokens_per_s, ",.0f"),
        "/".join(f"{share:.0%}" for share in run.time_split or ()) or "-",
        run.status,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began)),
    )


def marked(runs: Sequence[RecordedRun]) -> list[tuple[str, RecordedRun]]:
    """Each run with its mark; the last ones are the newest."""
    marks = " " * (len(runs) - len(MARKS)) + MARKS
    return list(zip(marks, runs, strict=False))


def table(runs: Sequence[RecordedRun]) -> str:
    """A line for each run."""
    rows = [HEAD, *((mark, *cells(run)) for mark, run in marked(runs))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        aligned = [
            f"{cell:>{width}}" if head in NUMBERS else f"{cell:{width}}"
            for cell, width, head in zip(row, widths, HEAD, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def thinned(points: Points, num_bins: int, first: int, last: int) -> dict[int, float]:
    """Mean value of the points of each bin of steps: bin -> value."""
    bins: dict[int, list[float]] = {}
    for step, value in points:
        place = (step - first) * (num_bins - 1) // max(1, last - first)
        bins.setdefault(place, []).append(value)
    return {place: sum(values) / len(values) for place, values in bins.items()}


def span(curves: Sequence[Points]) -> tuple[int, int]:
    """First and last step of some curves."""
    steps = [step for points in curves for step, _ in points]
    return min(steps), max(steps)


def plot(runs: Sequence[RecordedRun], metric: str) -> str:
    """Draw a metric of the runs that have a mark by step; `*` where several meet."""
    drawn = [(mark, points) for mark, run in marked(runs) if mark != " " and (points := run.points(metric))]
    if not drawn:
        return f"none of the newest {len(MARKS)} runs has {metric}"
    first, last = span([points for _, points in drawn])
    curves = [(mark, thinned(points, WIDTH, first, last)) for mark, points in drawn]
    values = [value for _, curve in curves for value in curve.values()]
    low, high = min(values), max(values)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, curve in curves:
        for place, value in curve.items():
            row = round((high - value) / (high - low) * (HEIGHT - 1)) if high > low else HEIGHT // 2
            grid[row][place] = mark if grid[row][place] == " " else OVERLAP
    labels = {0: high, HEIGHT // 2: high - (high - low) * (HEIGHT // 2) / (HEIGHT - 1), HEIGHT - 1: low}
    lines = [f"{metric} by step"]
    lines += [
        f"{number(labels.get(row), '.4g') if row in labels else '':>10} |{''.join(cells).rstrip()}"
        for row, cells in enumerate(grid)
    ]
    lines += [f"{'':>10} +{'-' * WIDTH}", f"{'':>10}  {first:<{WIDTH - 12}}{last:>12}"]
    if len(runs) > len(MARKS):
        lines.append(f"the oldest {len(runs) - len(MARKS)} runs are not drawn")
    return "\n".join(lines)
