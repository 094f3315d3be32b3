# SPDX-License-Identifier: Apache-2.0
"""Timelines as text and as drawings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

GB, MB = 2**30, 2**20
WIDTH, HEIGHT = 640, 160
SHOWN_LAYERS = 8


def lines(memory: dict[str, Any]) -> list[str]:
    """A rank's memory over the step, for a terminal."""
    unit, name_of_unit = (GB, "GB") if memory["live_bytes"] >= GB else (MB, "MB")

    def shown(sizes: Iterable[tuple[str, int]]) -> str:
        return "  ".join(f"{name} {size / unit:.3f}" for name, size in sizes)

    verdict = "" if "fits" not in memory else "  fits" if memory["fits"] else "  DOES NOT FIT"
    peaks = shown((name, memory[f"{name}_bytes"]) for name in ("live", "allocated", "pool"))
    layers = sorted(memory["by_layer"].items(), key=lambda item: -item[1])
    rest = sum(size for _, size in layers[SHOWN_LAYERS:])
    return [
        f"  memory over the step, {name_of_unit} at the peak: {peaks}{verdict}",
        f"    in the {memory['peak_in']}, operator {memory['peak_tick']:,} of {memory['num_ticks']:,}; with operators in the "
        f"order of the graph {shown([('live', memory['live_as_written_bytes'])])}",
        f"    by kind: {shown(memory['by_kind'].items())}",
        f"    by layer: {shown([*layers[:SHOWN_LAYERS], *([('others', rest)] if rest else [])])}",
        f"    {name_of_unit:>9}  {'kind':13} alive at the peak",
        *(f"    {one['bytes'] / unit:9.3f}  {one['kind']:13} {one['operator']}" for one in memory["largest"]),
    ]


def curves(ranks: Sequence[dict[str, Any]], limit: float = 0.0) -> str:
    """Draw the live bytes of each rank over its step; `limit`, bytes of a device, is a line across them."""
    drawn = []
    for rank in ranks:
        memory = rank["memory"]
        top, last = max(limit, memory["live_bytes"], 1), max(memory["num_ticks"], 1)
        points = " ".join(
            f"{WIDTH * tick / last:.1f},{HEIGHT - HEIGHT * size / top:.1f}" for tick, size in memory["curve"]
        )
        line = HEIGHT - HEIGHT * limit / top
        bound = f"<line x1='0' x2='{WIDTH}' y1='{line:.1f}' y2='{line:.1f}' stroke='#c22' stroke-dasharray='6'/>"
        peaks = ", ".join(f"{name} {memory[f'{name}_bytes'] / GB:.2f} GB" for name in ("live", "allocated", "pool"))
        limited = f"; dashed: the device's {limit / GB:.0f} GB" if limit else ""
        drawn.append(
            f"<p>rank {rank['rank']}: peak {peaks}, in the {escape(memory['peak_in'])}{limited}</p>"
            f"<svg width='{WIDTH}' height='{HEIGHT}' class='curve'><polyline points='0,{HEIGHT} {points} {WIDTH},{HEIGHT}' "
            f"fill='#a8c8e4' stroke='#4878a8'/>{bound if limit else ''}</svg>"
        )
    return "".join(drawn)
