# SPDX-License-Identifier: Apache-2.0
"""A page that compares runs: one HTML file with a table and curves, which fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sporeloom.core.errors import without_control
from sporeloom.core.html_report import PALETTE, document
from sporeloom.train.recorded import RecordedRun
from sporeloom.train.run_plots import HEAD, NUMBERS, cells, number, span, thinned

CHARTS = (
    ("loss", "Loss"),
    ("validation/loss", "Validation loss"),
    ("tokens_per_s", "Tokens per second"),
    ("mfu", "MFU"),
    ("compute_s", "Computation in a step, seconds"),
    ("communication_s", "Exposed communication in a step, seconds"),
    ("data_s", "Data in a step, seconds"),
    ("grad_norm", "Gradient norm"),
    ("learning_rate", "Learning rate"),
)
"""Metrics that are drawn where a run has them."""
DASHES = ("", "7 4", "2 3")
"""Strokes of the first runs, of the next ones with the same colors, and so on."""
WIDTH, HEIGHT, LEFT, BELOW, TOP = 640, 260, 64, 24, 8
NUM_POINTS = 400
STYLE = """.charts{display:grid;gap:1em;grid-template-columns:repeat(auto-fit,minmax(min(100%,30em),1fr))}
.charts svg{width:100%;height:auto}svg polyline{fill:none;stroke-width:1.8}svg.key{width:2.2em;height:.8em}"""


def stroke(index: int) -> str:
    """Attributes of the line of a run."""
    dash = DASHES[index // len(PALETTE) % len(DASHES)]
    return f"stroke='{PALETTE[index % len(PALETTE)]}'" + (f" stroke-dasharray='{dash}'" if dash else "")


def page(runs: Sequence[RecordedRun]) -> str:
    """The HTML file."""
    evaluated = sorted({name for run in runs for line in run.lines for name in line if _is_score(name)})
    curves = [*CHARTS, *((name, name.removeprefix("evaluation/")) for name in evaluated)]
    charts = [chart(runs, metric, title) for metric, title in curves if any(run.points(metric) for run in runs)]
    sections = [
        f"<style>{STYLE}</style><h1>Training runs</h1><div class='wide'>{table(runs)}</div>",
        f"<div class='charts'>{''.join(charts)}</div>",
    ]
    return document(f"{len(runs)} runs", sections)


def table(runs: Sequence[RecordedRun]) -> str:
    head = "".join(f"<th{_align(name)}>{escape(name)}</th>" for name in HEAD)
    rows = []
    for index, run in enumerate(runs):
        key = f"<svg class='key' viewBox='0 0 32 10'><polyline points='0,5 32,5' {stroke(index)}/></svg>"
        columns = zip(HEAD[1:], cells(run), strict=True)
        row = "".join(f"<td{_align(name)}>{escape(cell)}</td>" for name, cell in columns)
        rows.append(f"<tr><td>{key}</td>{row}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _align(name: str) -> str:
    return " class='n'" if name in NUMBERS else ""


def _is_score(metric: str) -> bool:
    """Whether a metric is a score of --eval-tasks, not its standard error."""
    return metric.startswith("evaluation/") and not metric.endswith("_stderr")


def chart(runs: Sequence[RecordedRun], metric: str, title: str) -> str:
    """Curves of a metric of all runs by step."""
    points = [run.points(metric) for run in runs]
    first, last = span(points)
    curves = [thinned(each, NUM_POINTS, first, last) for each in points]
    values = [value for curve in curves for value in curve.values()]
    low, high = min(values), max(values)
    right, bottom = WIDTH - 8, HEIGHT - BELOW

    def place(bin_: int, value: float) -> str:
        x = LEFT + (right - LEFT) * bin_ / (NUM_POINTS - 1)
        y = TOP + (bottom - TOP) * ((high - value) / (high - low) if high > low else 0.5)
        return f"{x:.1f},{y:.1f}"

    lines = "".join(
        f"<polyline points='{' '.join(place(*point) for point in sorted(curve.items()))}' {stroke(index)}>"
        f"<title>{escape(without_control(run.name))}: {number(run.last(metric), '.5g')}</title></polyline>"
        for index, (run, curve) in enumerate(zip(runs, curves, strict=True))
        if curve
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(title)} by step'>"
        f"<path class='axis' fill='none' d='M{LEFT} {TOP}V{bottom}H{right}'/>"
        f"<text x='{LEFT - 6}' y='{TOP + 10}' text-anchor='end'>{high:.4g}</text>"
        f"<text x='{LEFT - 6}' y='{bottom}' text-anchor='end'>{low:.4g}</text>"
        f"<text x='{LEFT}' y='{HEIGHT - 6}'>step {first}</text>"
        f"<text x='{right}' y='{HEIGHT - 6}' text-anchor='end'>{last}</text>{lines}</svg></figure>"
    )
