# SPDX-License-Identifier: Apache-2.0
"""The position of a graph node in the network, for messages."""

from __future__ import annotations

import re

PLUMBING = ("network", "step")
"""Attributes by which a training step refers to the network."""
_CELL = re.compile(r"(\w+)-[A-Z]\w*")  # name-Class for each Cell on the path; an operator is Add-op3


def place_of(domain: str) -> str:
    """Name the position of a node's domain, such as `model.layers.0.mlp, backward`; `the training step` outside of any
    Cell."""
    names = [found[1] for part in domain.split("/") if (found := _CELL.fullmatch(part)) and found[1] not in PLUMBING]
    phase = "backward" if domain.startswith("Gradients") else "recomputed" if "recompute_" in domain else "forward"
    return f"{'.'.join(names)}, {phase}" if names else "the training step"
