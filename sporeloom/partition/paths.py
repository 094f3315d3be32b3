# SPDX-License-Identifier: Apache-2.0
"""Paths of the operators that are not attributes of a Cell, such as `ops.matmul(x, w)` and `x + y`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from sporeloom.partition.graph import Graph, Name, Node

STRUCTURE = ("Constant", "Load", "Depend", "UpdateState", "MakeTuple", "TupleGetItem", "Return")
"""Kinds of nodes that are not operators."""


def functional_paths(graph: Graph) -> dict[str, Name]:
    """Find the forward operators without a path.

    Returns:
        `CELL.KIND` -> first output of the operator, in the order of the graph: CELL is the path of the Cell whose `construct`
        it is in. A second operator of the same kind there is `CELL.KIND_1`, a third one `CELL.KIND_2`.
    """
    counts: Counter[str] = Counter()
    found = {}
    for node in graph.nodes:
        if not _is_functional(node):
            continue
        assert node.scope is not None
        path = f"{node.scope.cell}.{node.kind}" if node.scope.cell else node.kind
        number = counts[path]
        counts[path] += 1
        found[f"{path}_{number}" if number else path] = node.outputs[0]
    return found


def with_paths(graph: Graph, paths: dict[Name, str]) -> Graph:
    """Set the paths of operators, given by their first outputs."""
    nodes = [replace(n, path=paths[n.outputs[0]]) if n.outputs and n.outputs[0] in paths else n for n in graph.nodes]
    return Graph(graph.parameters, graph.inputs, nodes, graph.outputs)


def _is_functional(node: Node) -> bool:
    scope = node.scope
    if scope is None or scope.is_backward or scope.again or scope.forward:
        return False
    return not node.path and node.kind not in STRUCTURE and any(node.types)
