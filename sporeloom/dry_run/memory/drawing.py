# SPDX-License-Identifier: Apache-2.0
"""Draw the memory of ranks over a step for the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from sporeloom.core.html_report import PALETTE, folded, margin, size, ticks, unit_of

WIDTH, HEIGHT, LEFT, TOP, BELOW = 720, 200, 74, 10, 36
LIMIT_SHOWN_FROM = 0.4
"""A device's limit is drawn where the peak is at least this share of it; else the curve would be flat."""
SHORT = {"forward": "F", "backward": "B", "update": "update"}


def curves(ranks: Sequence[dict[str, Any]], limit: float = 0.0) -> str:
    """Draw the live bytes of each rank over its step, equal ranks once; `limit`: bytes of a device, if not 0."""
    drawn = folded(ranks, lambda rank: int(rank["rank"]), lambda rank: repr(rank["memory"]))
    return "".join(_curve(label, rank["memory"], limit) for label, rank in drawn)


def _curve(label: str, memory: dict[str, Any], limit: float) -> str:
    peak, last = max(memory["live_bytes"], 1), max(memory["num_ticks"], 1)
    has_limit = limit and peak >= LIMIT_SHOWN_FROM * limit
    top = 1.08 * max(peak, limit if has_limit else 0)
    right, bottom = WIDTH - 8, HEIGHT - BELOW

    def x(tick: float) -> float:
        return LEFT + (right - LEFT) * tick / last

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / top

    points = " ".join(f"{x(tick):.1f},{y(value):.1f}" for tick, value in memory["curve"])
    unit, _ = unit_of(top)
    scale = "".join(
        f"<path class='axis' d='M{LEFT} {y(unit * value):.1f}H{right}'/>"
        f"<text x='{LEFT - 6}' y='{y(unit * value) + 4:.1f}' text-anchor='end'>{size(unit * value) if value else 0}</text>"
        for value in ticks(top / unit, 4)
    )
    line = (
        f"<path class='limit' stroke-dasharray='6' d='M{LEFT} {y(limit):.1f}H{right}'><title>limit of the device: "
        f"{size(limit)}</title></path>"
        if has_limit
        else ""
    )
    at = x(memory["peak_tick"])
    found = (
        f"{scale}{_phases(memory['phases'], x, bottom)}<polyline points='{x(0):.1f},{bottom} {points} {right},{bottom}' "
        f"fill='{PALETTE[0]}' fill-opacity='.35' stroke='{PALETTE[0]}'/>{line}"
        f"<circle cx='{at:.1f}' cy='{y(memory['live_bytes']):.1f}' r='4' fill='{PALETTE[3]}'><title>peak: "
        f"{size(memory['live_bytes'])}</title></circle>"
        f"<text x='{right}' y='{HEIGHT - 4}' text-anchor='end'>{memory['num_ticks']:,} operators in the order they run</text>"
    )
    peaks = ", ".join(f"{name} {size(memory[f'{name}_bytes'])}" for name in ("live", "allocated", "pool"))
    verdict = f" The pool {margin(memory['pool_bytes'], limit)}." if limit else ""
    return (
        f"<figure><figcaption>{escape(label)}</figcaption><p>Peak in the {escape(memory['peak_in'])} (dot): {peaks}."
        f"{verdict}</p><div class='wide'><svg class='chart' viewBox='0 0 {WIDTH} {HEIGHT}' role='img' "
        f"aria-label='memory of {escape(label)} over a step'>{found}</svg></div></figure>"
    )


def _phases(phases: Sequence[tuple[int, str]], x: Any, bottom: int) -> str:
    """Mark where passes begin, and name those that have room."""
    marks, free = [], 0.0
    for tick, name in phases:
        kind = next((short for word, short in SHORT.items() if name.startswith(word)), "")
        place = x(tick)
        tip = f"<title>{escape(name)}</title>"
        marks.append(f"<path class='axis' d='M{place:.1f} {bottom}v5'>{tip}</path>")
        if kind and place >= free:
            marks.append(f"<text x='{place:.1f}' y='{bottom + 17}'>{kind}{tip}</text>")
            free = place + 9 * len(kind) + 4
    return "".join(marks)
