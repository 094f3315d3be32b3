# SPDX-License-Identifier: Apache-2.0
"""Draw a simulated step for the HTML report: the passes of each stage in time, and what it spends its time on."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, ROW = 840, 22
COLORS = {"forward": "#78a8d0", "backward": "#90c070", "weights": "#d8b060", "parameters": "#9870b0"}
"""First word of a pass's name -> its color."""
OTHER = "#b8b8b8"


def drawing(time: dict[str, Any]) -> str:
    """Draw a bar for each pass, a row for each stage; a pass is as long as its computation and what it waits for."""
    bars = []
    for row, stage in enumerate(time["stages"]):
        y = 4 + ROW * row
        bars.append(f"<text x='0' y='{y + 14}'>stage {stage['stage']}</text>")
        for name, start, end in stage["passes"]:
            x, width = (WIDTH * seconds / time["seconds"] for seconds in (start, end - start))
            color = COLORS.get(name.split()[0], OTHER)
            tip = f"<title>{escape(name)}: {start * 1e3:.2f} to {end * 1e3:.2f} ms</title>"
            bars.append(f"<rect x='{70 + x:.2f}' y='{y}' width='{width:.2f}' height='18' fill='{color}'>{tip}</rect>")
    size = f"width='{80 + WIDTH}' height='{8 + ROW * len(time['stages'])}'"
    keys = "".join(f"<span class='key' style='background:{color}'></span>{name}" for name, color in COLORS.items())
    other = f"<span class='key' style='background:{OTHER}'></span>sums of gradients, update"
    return f"<p>{keys}{other}</p><svg {size} class='step'>{''.join(bars)}</svg>"
