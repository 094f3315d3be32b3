# SPDX-License-Identifier: Apache-2.0
"""Divides the graph of a whole batch, sharded by microbatches as if these were ranks, into what is computed once and what is
computed for each of them.

Where a graph is sharded along the axis MICROBATCHES, what a collective does along it is done on the host: an AllReduce adds
up what the microbatches gave, an AllGather puts it side by side, a slice takes a microbatch's rows. So the graph falls into
four, in the order in which they run:

    once       random numbers, which are drawn for the whole batch;
    early      for each microbatch, sums that depend on the inputs alone, not on parameters: how many tokens count, say;
    main       for each microbatch, all else that depends on its rows: losses and gradients;
    after      what depends on the sums of `main`: norms, updates, results.

A graph that needs a value of all microbatches to go on with one of them, and not of the inputs alone, is not divisible: a
mean of activations over the batch, say, by which its rows are then normalized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sporeloom.partition.graph import Graph, IsFirst, Name, Node, RankOffset, TensorType, followed, is_effect
from sporeloom.partition.grid import MICROBATCHES, DeviceGrid
from sporeloom.partition.held import MixedRowsError
from sporeloom.partition.stages import assemble

NUMBER = "microbatch."
"""Begins the names of the inputs that are the number of a microbatch; an element type follows."""


class Rows(NamedTuple):
    """A microbatch's part of a value."""

    source: Name
    dim: int


class Total(NamedTuple):
    """What the microbatches' values of a name make up together."""

    source: Name
    dim: int | None
    """In which they are put side by side; None: they are added up."""


@dataclass(slots=True)
class DividedGraph:
    """A graph as four, each with the names of the values that it is given."""

    once: Graph
    """Of inputs of the network."""
    drawn: list[Name]
    """What the outputs of `once` are to the others."""
    rows: dict[Name, Rows]
    """Inputs of `early` and `main` that are parts of inputs of the network, or of what `once` gives. Others are numbers of
    microbatches (see `NUMBER`)."""
    early: Graph
    early_totals: dict[Name, Total]
    """Inputs of `main` and `after`, made of the outputs of `early`."""
    main: Graph
    totals: dict[Name, Total]
    """Inputs of `after`, made of the outputs of `main`."""
    after: Graph


@dataclass(slots=True)
class _Facts:
    """What a value depends on."""

    rows: bool = False
    """On those of one microbatch."""
    parameters: bool = False
    drawn: bool = False
    """On random numbers."""
    early: bool = False
    """On a sum over microbatches that is known before `main`."""
    after: bool = False
    """On one that is known after it, or on a parameter that was written."""

    def __or__(self, other: _Facts) -> _Facts:
        return _Facts(
            self.rows or other.rows,
            self.parameters or other.parameters,
            self.drawn or other.drawn,
            self.early or other.early,
            self.after or other.after,
        )

    @property
    def is_once(self) -> bool:
        return self.drawn and not (self.rows or self.parameters or self.early or self.after)


def undivided(graph: Graph) -> DividedGraph:
    """A graph that is computed of the whole batch at once."""
    nothing = Graph({}, {}, [], [])
    return DividedGraph(nothing, [], {}, nothing, {}, nothing, {}, graph)


def divide(graph: Graph, grid: DeviceGrid) -> DividedGraph:
    """Divide a graph that is sharded along MICROBATCHES.

    Raises:
        MixedRowsError: it needs a value of all microbatches to go on with one of them.
    """
    return _Division(graph, grid).run()


@dataclass
class _Division:
    graph: Graph
    grid: DeviceGrid
    facts: dict[Name, _Facts] = field(default_factory=dict)
    rows: dict[Name, Rows] = field(default_factory=dict)
    early: dict[Name, Total] = field(default_factory=dict)
    totals: dict[Name, Total] = field(default_factory=dict)

    def run(self) -> DividedGraph:
        graph = self.graph
        self.types: dict[Name, TensorType | None] = {**graph.parameters, **graph.inputs}
        self.makers = {output: i for i, node in enumerate(graph.nodes) for output in node.outputs}
        self.reads_after = _reads_after_writes(graph)
        for node in graph.nodes:
            self.types |= zip(node.outputs, node.types, strict=True)
        effects = [i for i, node in enumerate(graph.nodes) if is_effect(node, graph)]
        live = self.needed(
            [*graph.outputs, *(name for i in effects for name in graph.nodes[i].outputs)], lambda _: False
        )[0]
        self.facts = {name: _Facts(parameters=True) for name in graph.parameters}
        self.facts |= {name: _Facts() for name in graph.inputs}
        for i in sorted(live):
            facts = self.look_at(graph.nodes[i], i)
            self.facts |= dict.fromkeys(graph.nodes[i].outputs, facts)
        return self.divided(effects)

    # What depends on what

    def look_at(self, node: Node, number: int) -> _Facts:
        facts = _Facts()
        for name in followed(node):
            facts |= self.facts.get(name, facts)
        facts.after |= number in self.reads_after
        axes = node.attributes.get("axes", ())
        if MICROBATCHES in axes:
            return self.along_microbatches(node, facts)
        if (
            node.kind == "Constant"
            and isinstance(node.value, (RankOffset, IsFirst))
            and MICROBATCHES in node.value.axes
        ):
            if isinstance(node.value, IsFirst) or node.types[0] is None:
                raise MixedRowsError(f"{node.outputs[0]}: rows are found by their place in the whole batch")
            facts.rows = True
        if node.attributes.get("side_effect_hidden"):
            if facts.rows or facts.parameters or facts.early:
                raise MixedRowsError(f"{_said(node)} draws random numbers by what depends on rows or parameters")
            facts.drawn = True
        if is_effect(node, self.graph):
            if facts.rows:
                raise MixedRowsError(f"{_said(node)} writes a parameter by the rows of one microbatch")
            facts.after = True
        if facts.rows and facts.after:
            raise MixedRowsError(f"{_said(node)} takes rows of one microbatch and what depends on all of them")
        return facts

    def along_microbatches(self, node: Node, facts: _Facts) -> _Facts:
        """A step that the host does."""
        (source,), (result,) = node.inputs, node.outputs
        assert isinstance(source, str)
        is_sum = node.kind == "AllReduce" and node.attributes.get("op") == "sum"
        if tuple(node.attributes["axes"]) != (MICROBATCHES,) or not (
            is_sum or node.kind in ("AllGather", "SliceOfRank")
        ):
            raise MixedRowsError(f"{_said(node)} is over all rows of the batch")
        if node.kind == "SliceOfRank":
            if facts.rows or facts.after:
                raise MixedRowsError(
                    f"{self.said(source)} depends on all rows of the batch, and its rows are wanted one by one"
                )
            if source in self.graph.inputs or facts.is_once:
                self.rows[result] = Rows(source, node.attributes["dim"])
            return replace(facts, rows=True)
        if not facts.rows or facts.after:
            raise MixedRowsError(f"{self.said(source)} is added up over microbatches, but has no rows of its own")
        total = Total(source, None if is_sum else node.attributes["dim"])
        if facts.parameters:
            self.totals[result] = total
            return _Facts(after=True)
        if facts.early:
            raise MixedRowsError(f"{self.said(source)} is added up over microbatches after another sum of the inputs")
        self.early[result] = total
        return _Facts(early=True)

    def said(self, name: Name) -> str:
        return _said(self.graph.nodes[self.makers[name]]) if name in self.makers else f"the input {name}"

    # The four graphs

    def divided(self, effects: Sequence[int]) -> DividedGraph:
        nodes = self.graph.nodes
        written = [name for i in effects for name in nodes[i].outputs]
        after = self.part([*self.graph.outputs, *written], self.graph.outputs)
        totals = {name: self.totals[name] for name in after.inputs if name in self.totals}
        main = self.summed(totals)
        given = dict.fromkeys([*after.inputs, *main.inputs])
        early_totals = {name: self.early[name] for name in given if name in self.early}
        early = self.summed(early_totals)
        given = dict.fromkeys([*given, *early.inputs])
        rows = {name: self.rows[name] for name in given if name in self.rows}
        drawn = [name for name in given if name not in self.rows and name in self.facts and self.facts[name].is_once]
        drawn += [each.source for each in rows.values() if each.source not in self.graph.inputs]
        drawn = list(dict.fromkeys(drawn))
        return DividedGraph(self.part(drawn, is_once=True), drawn, rows, early, early_totals, main, totals, after)

    def summed(self, totals: dict[Name, Total]) -> Graph:
        """What computes the parts of totals, which get the names that these have there."""
        sources = list(dict.fromkeys(total.source for total in totals.values()))
        graph = self.part(sources)
        found = dict(zip(sources, graph.outputs, strict=True))
        totals |= {name: total._replace(source=found[total.source]) for name, total in totals.items()}
        graph.outputs = list(dict.fromkeys(graph.outputs))
        return graph

    def part(self, roots: Sequence[Name], outputs: Sequence[Name] | None = None, is_once: bool = False) -> Graph:
        """What computes some values, from those that other parts give."""

        def is_given(name: Name) -> bool:
            known = name in self.rows or name in self.early or name in self.totals
            return known or (not is_once and self.facts[name].is_once)

        found, given = self.needed(roots, is_given)
        inputs = [name for name in self.graph.inputs if name in given]
        inputs += sorted(given - set(inputs), key=self.makers.__getitem__)
        nodes = [each for i in sorted(found) for each in self.by_number(self.graph.nodes[i])]
        counted = {name for node in nodes for name in node.flat_inputs() if name.startswith(NUMBER)}
        self.types |= {name: TensorType((), name.removeprefix(NUMBER)) for name in counted}
        roots = list(roots if outputs is None else outputs)
        return assemble(nodes, self.graph.parameters, [*inputs, *sorted(counted)], roots, self.types)

    def by_number(self, node: Node) -> list[Node]:
        """What depends on the place of a microbatch, computed from its number."""
        (result, *_), (type, *_) = node.outputs or ("",), node.types or (None,)
        if node.kind == "Constant" and isinstance(node.value, RankOffset) and MICROBATCHES in node.value.axes:
            (first, *rest), stride = node.value.axes, node.value.stride
            assert first == MICROBATCHES and type is not None
            step, within, before = (f"{result}.{each}" for each in ("step", "within", "before"))
            return [
                Node("Constant", (), (step,), (type,), value=stride * self.grid.degree(rest)),
                replace(node, outputs=(within,), value=RankOffset(tuple(rest), stride)),
                Node("Mul", (NUMBER + type.dtype, step), (before,), (type,)),
                Node("Add", (before, within), (result,), (type,)),
            ]
        if node.kind != "SliceOfRank" or MICROBATCHES not in node.attributes["axes"]:
            return [node]
        (source,), dim, wide = node.inputs, node.attributes["dim"], f"{result}.wide"
        assert isinstance(source, str) and type is not None
        shape = (*type.shape[:dim], self.grid.degree([MICROBATCHES]), *type.shape[dim:])
        numbers = {f"{result}.{each}": value for each, value in (("shape", shape), ("dim", dim), ("zero", 0))}
        return [
            *(Node("Constant", (), (name,), (None,), value=value) for name, value in numbers.items()),
            Node("Reshape", (source, f"{result}.shape"), (wide,), (TensorType(shape, type.dtype),)),
            Node("Gather", (wide, NUMBER + "int32", f"{result}.dim", f"{result}.zero"), (result,), (type,)),
        ]

    def needed(self, roots: Iterable[Name], is_given: Callable[[Name], bool]) -> tuple[set[int], set[Name]]:
        """Positions of the nodes that compute some values; the inputs of the network, and given values, that they take."""
        found, given, seen = set[int](), set[Name](), set[Name]()
        todo = list(roots)
        while todo:
            name = todo.pop()
            if name in seen or name in self.graph.parameters:
                continue
            seen.add(name)
            if name in self.graph.inputs or is_given(name):
                given.add(name)
                continue
            number = self.makers[name]
            if number not in found:
                found.add(number)
                node = self.graph.nodes[number]
                todo += followed(node)
        return found, given


def _said(node: Node) -> str:
    """An operator, for a person."""
    place = node.path or (node.scope.cell if node.scope else "")
    direction = "the gradient of " if node.scope and node.scope.is_backward else ""
    return f"{node.kind} in {direction}{place or 'the network'}"


def _reads_after_writes(graph: Graph) -> set[int]:
    """Positions of the nodes that read a parameter after an operator of the same graph has written it."""
    number_of = {
        i: number for number, i in enumerate(i for i, node in enumerate(graph.nodes) if is_effect(node, graph))
    }
    writers: dict[Name, int] = {}
    """Of each parameter, as bits."""
    behind: dict[Name, int] = {}
    """Writes that a value comes after, as bits."""
    found = set()
    for i, node in enumerate(graph.nodes):
        waits = 0
        for name in node.flat_inputs():
            waits |= behind.get(name, 0)
        if any(waits & writers.get(name, 0) for name in node.flat_inputs()):
            found.add(i)
        if i in number_of:
            waits |= 1 << number_of[i]
            for name in node.flat_inputs():
                if name in graph.parameters:
                    writers[name] = writers.get(name, 0) | 1 << number_of[i]
        behind |= dict.fromkeys(node.outputs, waits)
    return found
