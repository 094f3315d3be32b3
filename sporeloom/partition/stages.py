# SPDX-License-Identifier: Apache-2.0
"""Partitions the sharded graph of a microbatch's loss and gradients into the passes of pipeline stages.

A model is divided into parts, of which each stage has one or more (interleaved stages). A forward operator belongs to the
part of its Cell, or else follows its inputs; a backward operator belongs to the part of its forward operator. An operator
that depends on no part, such as a mask, is computed in each part that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sporeloom.partition.assemble import assemble, with_names
from sporeloom.partition.graph import Graph, Name, Node, TensorType, followed, is_effect
from sporeloom.partition.parameter_values import ParameterValues, of_parameters_alone
from sporeloom.partition.parts_of_nodes import Place, places_of_nodes

PassKind = Literal["parameters", "forward", "backward", "weights"]


class StagePass(NamedTuple):
    """A pass of one part of the model for one microbatch."""

    kind: PassKind
    """`parameters`: values of parameters alone, gathered or cast once for all microbatches; `weights`: gradients of weights
    that no other part waits for, if they are split from the backward pass (zero bubble)."""
    part: int


@dataclass(slots=True)
class PassGraph:
    """The graph of a pass. Its inputs are inputs of the network, then values from other passes."""

    graph: Graph
    network_inputs: list[int]
    """Indices of the network's inputs among its first inputs."""
    taken: list[Name]
    """Values received from other passes."""
    given: list[Name]
    """Names of its outputs."""


@dataclass(slots=True)
class StageGraphs:
    """The graph of a microbatch, partitioned into passes."""

    passes: dict[StagePass, PassGraph]
    """Only passes that compute something."""
    givers: dict[Name, StagePass]
    """Value that is a result or that another pass receives -> the pass that computes it."""
    takers: dict[Name, list[StagePass]]
    results: list[dict[int, Name]]
    """For each output: part -> its summand. Gradients of a weight shared by several parts have several summands."""
    holders: dict[Name, list[int]] = field(default_factory=dict)
    """Parameter -> parts that use it."""
    kept: set[Name] = field(default_factory=set)
    """Values that `parameters` passes compute once for all microbatches."""


def cut_into_stages(
    graph: Graph,
    parts: Mapping[str, int],
    splits_weights: bool = False,
    sums_from: int | None = None,
    stage_of: Callable[[int], int] = lambda part: part,
    keeps_casts: bool = False,
) -> StageGraphs:
    """Partition a sharded graph of a microbatch.

    Args:
        parts: path of a Cell -> its part of the model, which includes nested Cells; other operators follow their inputs.
        splits_weights: whether gradients of weights become separate passes (zero bubble).
        sums_from: outputs from this index on are gradients, to which several parts may contribute summands.
        stage_of: part -> its stage; a parameter that several parts of a stage need gathered is gathered once.
        keeps_casts: whether weights in half precision are kept for all microbatches; else each pass casts its own.
    """
    places = places_of_nodes(graph, parts)
    return _Cut(graph, places, splits_weights, sums_from, of_parameters_alone(graph, keeps_casts), stage_of).run()


class _Cut:
    def __init__(
        self,
        graph: Graph,
        places: Sequence[Place],
        splits_weights: bool,
        sums_from: int | None,
        once: ParameterValues,
        stage_of: Callable[[int], int],
    ):
        self.graph, self.places, self.once, self.stage_of = graph, list(places), once, stage_of
        self.nodes = [with_names(node, once.same) if once.same else node for node in graph.nodes]
        self.splits_weights, self.sums_from = splits_weights, sums_from
        self.makers = {output: i for i, node in enumerate(self.nodes) for output in node.outputs}
        self.types: dict[Name, TensorType | None] = {**graph.parameters, **graph.inputs}
        for node in self.nodes:
            self.types |= zip(node.outputs, node.types, strict=True)

    def run(self) -> StageGraphs:
        sums_from = len(self.graph.outputs) if self.sums_from is None else self.sums_from
        results = [self.result(output, i >= sums_from) for i, output in enumerate(self.graph.outputs)]
        live = self.live(results)
        of_node = self.passes_of_nodes(live)
        members: dict[StagePass, list[int]] = {}
        for i, one in enumerate(of_node):
            if one is not None:
                members.setdefault(one, []).append(i)
        built = {one: self.closure(one, found, of_node) for one, found in members.items()}
        givers: dict[Name, StagePass] = {}
        takers: dict[Name, list[StagePass]] = {}
        for one in sorted(built, key=_order):
            for name in built[one][1]:
                if name in self.once.kept:
                    continue
                maker = of_node[self.makers[name]]
                assert maker is not None
                givers[name] = maker
                takers.setdefault(name, []).append(one)
        wanted: dict[StagePass, dict[Name, None]] = {one: {} for one in built}
        for name, maker in givers.items():
            wanted[maker][name] = None
        for result in results:
            for name in result.values():
                maker = of_node[self.makers[name]]
                assert maker is not None
                givers[name] = maker
                wanted[maker][name] = None
        passes = {
            one: self.pass_graph(found, taken, list(wanted[one]))
            for one, (found, taken) in built.items()
            if wanted[one] or any(is_effect(self.nodes[i], self.graph) for i in found)
        }
        kept: dict[int, dict[Name, None]] = {}
        first: dict[int, int] = {}
        for one, made in sorted(passes.items(), key=lambda item: item[0].part):
            part = first.setdefault(self.stage_of(one.part), one.part)
            kept.setdefault(part, {}).update((name, None) for name in made.taken if name in self.once.kept)
        for part, names in kept.items():
            if names:
                one = StagePass("parameters", part)
                found, _ = self.closure(one, [self.makers[name] for name in names], of_node)
                passes[one] = self.pass_graph(found, [], list(names))
        holders: dict[Name, list[int]] = {}
        for one, made in passes.items():
            for name in made.graph.parameters:
                if one.part not in holders.setdefault(name, []):
                    holders[name].append(one.part)
        return StageGraphs(
            passes,
            givers,
            takers,
            results,
            {name: sorted(found) for name, found in holders.items()},
            {name for names in kept.values() for name in names},
        )

    # Results

    def result(self, output: Name, is_sum: bool) -> dict[int, Name]:
        """The summands of an output by part."""
        shares = self.shares(output) if is_sum else {}
        if len(shares) < 2:
            name = output if output in self.makers else self.passed_on(output)
            place = self.places[self.makers[name]]
            if place.part is None or self.makers[name] in self.once.nodes:  # a constant, or zeros for an unused weight
                at = Place(place.part or 0, True)
                name = self.add(Node("Depend", (name, name), (f"{name}.result",), (self.types[name],)), at)
                return {place.part or 0: name}
            return {place.part: name}
        return {part: self.summed(output, part, names) for part, names in shares.items()}

    def passed_on(self, name: Name) -> Name:
        return self.add(Node("Depend", (name, name), (f"{name}.result",), (self.types[name],)), Place(0, False))

    def shares(self, name: Name) -> dict[int, list[Name]]:
        """The summands of a value by part; empty if they cannot be determined."""
        maker = self.makers.get(name)
        if maker is None:
            return {}
        node, place = self.nodes[maker], self.places[maker]
        if node.kind == "Depend" and isinstance(node.inputs[0], str):  # its dependency is computed anyway
            return self.shares(node.inputs[0])
        items = [item for each in node.inputs for item in ((each,) if isinstance(each, str) else each)]
        if node.kind in ("Add", "AddN") and all(self.types.get(item) == node.types[0] for item in items):
            of_items = [self.shares(item) for item in items]
            if all(of_items) and len({part for shares in of_items for part in shares}) > 1:
                joined: dict[int, list[Name]] = {}
                for shares in of_items:
                    for part, names in shares.items():
                        joined.setdefault(part, []).extend(names)
                return joined
        return {} if place.part is None else {place.part: [name]}

    def summed(self, output: Name, part: int, names: Sequence[Name]) -> Name:
        if len(names) == 1:
            return names[0]
        sum_of, *rest = names
        for i, name in enumerate(rest):
            node = Node("Add", (sum_of, name), (f"{output}.part{part}.{i}",), (self.types[output],))
            sum_of = self.add(node, Place(part, True))
        return sum_of

    def add(self, node: Node, place: Place) -> Name:
        self.makers |= dict.fromkeys(node.outputs, len(self.nodes))
        self.types |= zip(node.outputs, node.types, strict=True)
        self.nodes.append(node)
        self.places.append(place)
        return node.outputs[0]

    # Passes

    def live(self, results: Sequence[Mapping[int, Name]]) -> set[int]:
        """The nodes that results or written parameters depend on, without sums whose summands are results."""
        names = [name for shares in results for name in shares.values()]
        names += [node.outputs[0] for node in self.nodes if is_effect(node, self.graph)]
        todo = [self.makers[name] for name in names]
        found = set(todo)
        while todo:
            for name in followed(self.nodes[todo.pop()]):
                maker = self.makers.get(name)
                if maker is not None and maker not in found:
                    found.add(maker)
                    todo.append(maker)
        return found

    def passes_of_nodes(self, live: set[int]) -> list[StagePass | None]:
        """The pass that computes each node; None: every pass that uses it, or no pass."""
        found: list[StagePass | None] = [
            StagePass("backward" if place.is_backward else "forward", place.part)
            if place.part is not None and i in live and i not in self.once.nodes
            else None
            for i, place in enumerate(self.places)
        ]
        if not self.splits_weights:
            return found
        waited: set[int] = set()
        for i, node in enumerate(self.nodes):
            one = found[i]
            for name in node.flat_inputs():
                maker = self.makers.get(name)
                if one and maker is not None and (other := found[maker]) and other != one and other.kind == "backward":
                    waited.add(maker)
        todo = list(waited)
        while todo:
            for name in self.nodes[todo.pop()].flat_inputs():
                maker = self.makers.get(name)
                if maker is not None and maker not in waited:
                    waited.add(maker)
                    todo.append(maker)
        return [
            one._replace(kind="weights") if one and one.kind == "backward" and i not in waited else one
            for i, one in enumerate(found)
        ]

    def closure(
        self, one: StagePass, members: Iterable[int], of_node: Sequence[StagePass | None]
    ) -> tuple[set[int], list[Name]]:
        """The nodes of a pass, with the unassigned nodes that it uses, and the values that it receives from other
        passes."""
        found, taken, todo = set(members), dict[Name, None](), list(members)
        while todo:
            node = self.nodes[todo.pop()]
            for name in followed(node):
                maker = self.makers.get(name)
                if maker is None or maker in found or name in taken:
                    continue
                if name in self.once.kept and one.kind != "parameters":
                    taken[name] = None
                elif of_node[maker] in (None, one) or self.types[name] is None:
                    found.add(maker)
                    todo.append(maker)
                else:
                    taken[name] = None
        return found, sorted(taken, key=self.makers.__getitem__)

    def pass_graph(self, found: set[int], taken: Sequence[Name], outputs: Sequence[Name]) -> PassGraph:
        nodes = [self.nodes[i] for i in sorted(found)]
        used = {name for node in nodes for name in node.flat_inputs()}
        inputs = {name: type for name, type in self.graph.inputs.items() if name in used}
        made = assemble(nodes, self.graph.parameters, [*inputs, *taken], outputs, self.types)
        positions = {name: position for position, name in enumerate(self.graph.inputs)}
        return PassGraph(made, [positions[name] for name in inputs], list(taken), list(outputs))


def _order(one: StagePass) -> tuple[int, int]:
    kinds: tuple[PassKind, ...] = ("parameters", "forward", "backward", "weights")
    return kinds.index(one.kind), one.part
