# SPDX-License-Identifier: Apache-2.0
"""Finds the values that depend on parameters alone, and so are the same for all microbatches of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sporeloom.partition.graph import OF_THIS_PASS, Graph, Name, Node, followed, is_effect
from sporeloom.partition.sharded_graph import SENT

HALF = ("float16", "bfloat16")


@dataclass(slots=True)
class ParameterValues:
    """The values that depend only on parameters that the graph does not write."""

    nodes: set[int] = field(default_factory=set)
    """Indices of the operators that compute them."""
    kept: set[Name] = field(default_factory=set)
    """The subset of these values that is computed once and kept for all microbatches: what needs communication, and weights
    in half precision. Each pass would otherwise send, or read and write, all of them again."""
    same: dict[Name, Name] = field(default_factory=dict)
    """Value -> an equal value that is computed earlier."""


def of_parameters_alone(graph: Graph, keeps_casts: bool = False) -> ParameterValues:
    """Find the values that are the same for all microbatches. `keeps_casts`: whether casts to half precision are kept."""
    found, first = ParameterValues(), dict[Any, Name]()
    written = {n for node in graph.nodes if is_effect(node, graph) for n in node.flat_inputs() if n in graph.parameters}
    known = {*graph.parameters} - written
    for i, node in enumerate(graph.nodes):
        names = [found.same.get(name, name) for name in followed(node)]
        if node.kind == "Load":  # its dependency has not written this parameter
            names = names[:1]
        if (
            node.kind == "UpdateState"
            or node.attributes.get(OF_THIS_PASS)
            or not all(name in known for name in names)
            or not node.outputs
        ):
            continue
        if node.kind != "Constant" and (
            not names or node.attributes.get("side_effect_hidden") or is_effect(node, graph)
        ):
            continue
        found.nodes.add(i)
        known |= set(node.outputs)
        if node.kind == "Constant":
            continue
        if any(name in found.kept for name in names) or node.kind in SENT or (keeps_casts and _halves(node)):
            found.kept |= set(node.outputs)
        for position, output in enumerate(node.outputs):
            if node.kind == "Depend":
                found.same[output] = names[0]
            elif node.again:
                found.same[output] = first.setdefault((node.again, position), output)
            elif node.kind == "Load":
                found.same[output] = first.setdefault(("Load", names[0]), output)
            elif node.scope is None:
                key = node.kind, *names, *sorted(node.attributes.items()), *node.types, position
                found.same[output] = first.setdefault(repr(key), output)
            else:
                first.setdefault((node.scope.name, position), output)
    found.same = {name: same for name, same in found.same.items() if name != same}
    return found


def _halves(node: Node) -> bool:
    """Whether a node casts to half precision."""
    return node.kind == "Cast" and all(type is not None and type.dtype in HALF for type in node.types)
