# SPDX-License-Identifier: Apache-2.0
"""MindFormers' `swap_config`: activations kept in the host's memory."""

from __future__ import annotations

from typing import Any

from sporeloom.dialects.settings import InputKeys, LossNotes
from sporeloom.strategy.config import Offload, Strategy


def read_swap(book: InputKeys) -> Offload | None:
    """Layers whose activations are moved to the host."""
    entries = book.peek("swap_config.layer_swap") if book.peek("swap_config.swap", False) else None
    book.note("swap_config.swap", "renamed" if entries else "same", "offload.layers" if entries else "nothing is moved")
    book.note("swap_config.default_prefetch", "no effect", "when they come back, no result depends on it")
    for key in ("layer_swap", "op_swap"):
        if not entries or key == "op_swap":
            book.note(f"swap_config.{key}", "no effect" if not entries else "not expressible", "whole layers are moved")
    if not entries:
        return None
    found: set[int] = set()
    for entry in entries if isinstance(entries, list) else [entries]:
        layers = entry.get("layers") if isinstance(entry, dict) else None
        if layers is True:
            book.note("swap_config.layer_swap", "renamed", "offload.layers all")
            return Offload(layers="all")
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            book.note("swap_config.layer_swap", "not expressible", f"{entry!r}: a list of layer numbers is expected")
            return None
        found.update(layers)
    book.note("swap_config.layer_swap", "renamed", f"offload.layers {sorted(found)}")
    return Offload(layers=sorted(found)) if found else None


def written_swap(strategy: Strategy, lost: LossNotes) -> dict[str, Any]:
    """Format its keys; none where nothing is moved."""
    if strategy.optimizer_on_host:
        lost("offload.optimizer", "MindFormers moves activations alone")
    if not (strategy.offload and (layers := strategy.offload.layers)):
        return {}
    moved = {"layers": True if layers == "all" else layers, "backward_prefetch": 1}
    return {"swap_config.swap": True, "swap_config.layer_swap": [moved]}
