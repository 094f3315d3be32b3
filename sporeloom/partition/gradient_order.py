# SPDX-License-Identifier: Apache-2.0
"""Puts the operators that compute a single gradient, and its collectives, where the backward pass makes their inputs."""

from __future__ import annotations

from sporeloom.partition.graph import Graph, Name, Node, is_effect

SEVERAL = -1


def gradients_when_due(graph: Graph) -> list[Node]:
    """The nodes of a graph, of which those that lead to one output alone follow their inputs at once.

    MindSpore's gradients of weights come after all gradients of activations. Collectives run in the order of the graph, so a
    reduce-scatter among them would begin when nothing is left to hide it, and until then whole gradients would be kept.
    """
    leads_to: dict[Name, int] = {}
    """Value -> the output that it leads to, or SEVERAL."""
    for number, name in enumerate(graph.outputs):
        leads_to[name] = SEVERAL if name in leads_to else number
    alone = [False] * len(graph.nodes)
    for number in reversed(range(len(graph.nodes))):
        node = graph.nodes[number]
        reached = {leads_to[name] for name in node.outputs if name in leads_to}
        target = reached.pop() if len(reached) == 1 else SEVERAL
        alone[number] = target != SEVERAL and not is_effect(node, graph)
        for name in node.flat_inputs():
            leads_to[name] = target if leads_to.get(name, target) == target else SEVERAL
    place: dict[Name, int] = {}
    keys = list[int]()
    for number, node in enumerate(graph.nodes):
        made = [place[name] for name in node.flat_inputs() if name in place]
        keys.append(max(made) if alone[number] and made else number)
        place |= dict.fromkeys(node.outputs, keys[-1])
    return [graph.nodes[number] for number in sorted(range(len(keys)), key=keys.__getitem__)]
