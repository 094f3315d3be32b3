# SPDX-License-Identifier: Apache-2.0
"""Where in a network a node of its graph comes from, for people."""

from __future__ import annotations

import re

PLUMBING = ("network", "step")
"""Attributes by which a training step holds the network."""
_CELL = re.compile(r"(\w+)-[A-Z]\w*")  # MindSpore writes name-Class of each Cell on the way; an operator is Add-op3


def place_of(domain: str) -> str:
    """`model.layers.0.mlp, backward` of what MindSpore calls a node's domain; `the training step` outside of any Cell."""
    names = [found[1] for part in domain.split("/") if (found := _CELL.fullmatch(part)) and found[1] not in PLUMBING]
    phase = "backward" if domain.startswith("Gradients") else "recomputed" if "recompute_" in domain else "forward"
    return f"{'.'.join(names)}, {phase}" if names else "the training step"
