# SPDX-License-Identifier: Apache-2.0
"""Graphs made of some nodes of another graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sporeloom.partition.graph import Graph, Input, Name, Node, TensorType, is_effect
from sporeloom.partition.sharded_graph import PartitionError


def assemble(
    nodes: Sequence[Node],
    parameters: Mapping[Name, TensorType],
    inputs: Sequence[Name],
    outputs: Sequence[Name],
    types: Mapping[Name, TensorType | None],
    roots: Sequence[Name] = (),
) -> Graph:
    """Build a graph of some nodes, with the dependencies between them.

    Args:
        roots: values that must be computed even if they are unused, in addition to all writes of parameters.

    Raises:
        PartitionError: it has side effects, but no output that could depend on them.
    """
    there, renamed = {*parameters, *inputs}, dict[Name, Name]()
    kept: list[Node] = []
    for node in nodes:
        given = with_names(node, renamed).inputs
        if node.kind in ("UpdateState", "Depend"):
            first, *rest = given
            rest = [each for each in (_those(each, there) for each in rest) if each]
            if not rest and isinstance(first, str):
                renamed[node.outputs[0]] = first
                continue
            given = (first, *rest)
        kept.append(replace(node, inputs=given))
        there |= set(node.outputs)
    used = {name for node in kept for name in node.flat_inputs()}
    graph = Graph({name: type for name, type in parameters.items() if name in used}, {}, kept, [])
    graph.outputs = [renamed.get(name, name) for name in outputs]
    for name in inputs:
        type = types[name]
        assert type is not None, name
        graph.inputs[name] = type
    done = [node.outputs[0] for node in kept if is_effect(node, graph)] + list(roots)
    if done and not graph.outputs:
        raise PartitionError("a pass of a stage writes parameters, but nobody takes anything from it")
    for i, name in enumerate(done):
        first, waiting = graph.outputs[0], f"{outputs[0]}.done{i}"
        kept.append(Node("Depend", (first, name), (waiting,), (types[outputs[0]],)))
        graph.outputs[0] = waiting
    return graph


def with_names(node: Node, names: Mapping[Name, Name]) -> Node:
    """Rename the inputs of a node."""

    def renamed(given: Input) -> Input:
        return names.get(given, given) if isinstance(given, str) else tuple(names.get(name, name) for name in given)

    return replace(node, inputs=tuple(map(renamed, node.inputs)))


def _those(given: Input, there: set[Name]) -> Input:
    """Restrict the values that a node waits for to those that exist."""
    if isinstance(given, str):
        return given if given in there else ()
    return tuple(name for name in given if name in there)
