# SPDX-License-Identifier: Apache-2.0
"""The part of the model, and the direction, in which each node of a graph is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sporeloom.partition.graph import OF_THIS_PASS, Graph, Name, Node, Scope, followed, is_effect

NOWHERE = Scope()


class Place(NamedTuple):
    """The part and the direction in which an operator is computed."""

    part: int | None
    """None: in every part that uses its outputs."""
    is_backward: bool


ANYWHERE = Place(None, False)


def places_of_nodes(graph: Graph, parts: Mapping[str, int]) -> list[Place]:
    """The place of each node."""
    pinned: dict[Name, int] = {}
    while True:
        placed = PlacesOfNodes(graph, parts, pinned)
        if placed.written == pinned:
            return _gathered_where_wanted(graph, placed.found)
        pinned = placed.written


def _gathered_where_wanted(graph: Graph, places: Sequence[Place]) -> list[Place]:
    """Move an all-gather to the only part that uses its result, so that shards are sent between stages."""
    found, users = list(places), dict[Name, set[Place]]()
    for node, place in zip(graph.nodes, places, strict=True):
        for name in followed(node):
            users.setdefault(name, set()).add(place)
    for i, node in enumerate(graph.nodes):
        wanted = users.get(node.outputs[0], set())
        parts = {place.part for place in wanted}
        if node.kind == "AllGather" and node.scope is None and len(parts) == 1 and None not in parts:
            found[i] = Place(parts.pop(), all(place.is_backward for place in wanted))
    return found


class PlacesOfNodes:
    """Places of nodes from one traversal of the graph. `pinned`: parameter -> the part that writes it."""

    def __init__(self, graph: Graph, parts: Mapping[str, int], pinned: Mapping[Name, int]):
        self.graph, self.parts = graph, parts
        self.found: list[Place] = []
        self.written: dict[Name, int] = {}
        self._of: dict[Name, Place] = {}
        self._forward: dict[Name, int | None] = {}
        for node in graph.nodes:
            loaded = pinned.get(next(node.flat_inputs())) if node.kind == "Load" else None
            place = self.place(node) if loaded is None else Place(loaded, False)
            self.found.append(place)
            self._of |= dict.fromkeys(node.outputs, place)
            scope = node.scope or NOWHERE
            if scope.name and scope.name not in self._forward:
                self._forward[scope.name] = place.part
            if is_effect(node, graph):
                self.written |= {name: place.part or 0 for name in node.flat_inputs() if name in graph.parameters}

    def place(self, node: Node) -> Place:
        scope = node.scope or NOWHERE
        if node.kind in ("Constant", "UpdateState", "Load"):
            return ANYWHERE
        if node.attributes.get(OF_THIS_PASS):  # each part that uses a weight gathers it
            return Place(None, scope.is_backward)
        given = [self._of[name] for name in node.flat_inputs() if name in self._of]
        is_backward = scope.is_backward or any(place.is_backward for place in given)
        if (
            node.kind == "Depend"
            and is_backward
            and not any(self._of[n].is_backward for n in followed(node) if n in self._of)
        ):
            return Place(
                None, True
            )  # recomputation waits for a gradient, maybe of another part: computed where it is used
        behind = [place.part for place in given if place.is_backward and place.part is not None]
        before = [place.part for place in given if not place.is_backward and place.part is not None]
        part = self._forward.get(scope.forward) if scope.forward else self.part_of(scope.cell)
        if is_backward and behind and node.kind in ("Add", "AddN"):
            part = None  # the gradient of a received value is summed before it is sent back
        if is_backward:
            if part is None and (behind or before):
                part = min(behind) if behind else max(before)
            return Place(min([part, *behind]) if part is not None else None, True)
        if part is not None or before:
            part = max([*before, part if part is not None else 0])
        if part is None and (is_effect(node, self.graph) or node.attributes.get("side_effect_hidden")):
            part = 0
        return Place(part, False)

    def part_of(self, cell: str) -> int | None:
        """The part of the innermost enclosing Cell that is assigned to one."""
        found = [path for path in self.parts if f".{path}." in f".{cell}."]
        return self.parts[max(found, key=len)] if found else None
