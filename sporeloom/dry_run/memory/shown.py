# SPDX-License-Identifier: Apache-2.0
"""Timelines as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GB, MB = 2**30, 2**20
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
