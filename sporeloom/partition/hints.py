# SPDX-License-Identifier: Apache-2.0
"""What a walk in the order of a graph cannot see: how those who come later want a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from sporeloom.partition.graph import Graph, Name, TensorType
from sporeloom.partition.operators.elementwise import HANDLERS as ELEMENTWISE
from sporeloom.strategy.layout import Layout

Known = TypeVar("Known")


def wanted_by_updates(graph: Graph, parameters: Mapping[Name, Layout]) -> dict[Name, Layout]:
    """Values that an update of a sharded parameter is made of, entry by entry, and its dims: gradients, mostly. Where a sum
    of one is pending each rank needs its own part alone, whoever looks at the gradient before, as a norm does."""
    types: dict[Name, TensorType | None] = {**graph.parameters, **graph.inputs}
    for node in graph.nodes:
        types |= zip(node.outputs, node.types, strict=True)
    wanted: dict[Name, Layout] = {}
    for node in reversed(graph.nodes):
        first = next(node.flat_inputs(), "")
        if node.attributes.get("side_effect_mem"):
            dims, like = parameters.get(first), types.get(first)
        elif node.kind in ELEMENTWISE or node.kind == "Depend":
            dims, like = wanted.get(node.outputs[0]), node.types[0]
        else:
            continue
        if dims is None or like is None or not any(dims):
            continue
        for name in node.flat_inputs():
            type = types.get(name)
            if type is not None and type.shape == like.shape and name not in graph.parameters:
                wanted.setdefault(name, dims)
    return wanted
