# SPDX-License-Identifier: Apache-2.0
"""The operators that a rank runs for each one of a sharded graph, with their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sporeloom.partition.graph import Graph, Name, Node, TensorType


def along_first_dim(graph: Graph) -> list[Node]:
    """The operators of a graph with the two transposes around each AllGather and ReduceScatter of another dim than 0."""
    types: dict[Name, TensorType | None] = {**graph.parameters, **graph.inputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.extend(_turned(node, types))
        types |= zip(node.outputs, node.types, strict=True)
    return nodes


def _turned(node: Node, types: dict[Name, TensorType | None]) -> Iterator[Node]:
    dim, given = node.attributes.get("dim"), node.inputs[0] if node.inputs else ""
    if node.kind not in ("AllGather", "ReduceScatter") or not dim or not isinstance(given, str):
        yield node
        return
    before, (after,) = types[given], node.types
    turned, done = (f"{node.outputs[0]}.{step}" for step in ("turned", "done"))
    yield Node("Transpose", (given,), (turned,), (_to_front(before, dim),), scope=node.scope)
    yield replace(node, inputs=(turned,), outputs=(done,), types=(_to_front(after, dim),))
    yield Node("Transpose", (done,), node.outputs, (after,), scope=node.scope)


def _to_front(type: TensorType | None, dim: int) -> TensorType | None:
    if type is None:
        return None
    return TensorType((type.shape[dim], *type.shape[:dim], *type.shape[dim + 1 :]), type.dtype)
