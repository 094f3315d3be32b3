# SPDX-License-Identifier: Apache-2.0
"""Divides the graph of a full batch, sharded over microbatches as if these were ranks, into graphs that run once per
step and graphs that run once per microbatch (gradient accumulation).

Collectives along the axis MICROBATCHES are performed by the host: an AllReduce sums the microbatches' values, an AllGather
concatenates them, a slice selects the rows of a microbatch. This divides the graph into four, in the order in which they run:

    once       random numbers, which are drawn for the full batch;
    early      for each microbatch, sums that depend on the inputs but not on parameters, such as a number of tokens;
    main       for each microbatch, everything else that depends on its rows: losses and gradients;
    after      what depends on the sums of `main`: norms, updates, results.

A graph is not divisible if a value of all microbatches that depends on parameters is needed to compute one of them, such as
a mean of activations over the batch by which each row is normalized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sporeloom.partition.assemble import assemble
from sporeloom.partition.graph import Graph, IsFirst, Name, Node, RankOffset, TensorType, followed, is_effect
from sporeloom.partition.grid import MICROBATCHES, DeviceGrid
from sporeloom.partition.sharded_graph import MixedRowsError

NUMBER = "microbatch."
"""Prefix of the names of inputs that are the index of a microbatch; the element type follows."""


class Rows(NamedTuple):
    """The slice of a value that belongs to a microbatch."""

    source: Name
    dim: int


class Total(NamedTuple):
    """The sum or concatenation of a value over all microbatches."""

    source: Name
    dim: int | None
    """Dim of the concatenation; None: the sum."""


@dataclass(slots=True)
class DividedGraph:
    """A graph divided into four, with the names of the values that each receives."""

    once: Graph
    """Its inputs are inputs of the network."""
    drawn: list[Name]
    """Names under which the other graphs receive the outputs of `once`."""
    rows: dict[Name, Rows]
    """Inputs of `early` and `main` that are rows of inputs of the network or of outputs of `once`. Other inputs are
    indices of microbatches (see `NUMBER`)."""
    early: Graph
    early_totals: dict[Name, Total]
    """Inputs of `main` and `after`: totals of outputs of `early`."""
    main: Graph
    totals: dict[Name, Total]
    """Inputs of `after`: totals of outputs of `main`."""
    after: Graph


@dataclass(slots=True)
class _Facts:
    """The kinds of values that a value depends on."""

    rows: bool = False
    """Whether it depends on rows of one microbatch."""
    parameters: bool = False
    drawn: bool = False
    """Whether it depends on random numbers."""
    early: bool = False
    """Whether it depends on a total that is known before `main`."""
    after: bool = False
    """Whether it depends on a total that is known after `main`, or on a parameter that has been written."""

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
    """A graph that is computed for the full batch at once."""
    nothing = Graph({}, {}, [], [])
    return DividedGraph(nothing, [], {}, nothing, {}, nothing, {}, graph)


def divide(graph: Graph, grid: DeviceGrid) -> DividedGraph:
    """Divide a graph that is sharded along MICROBATCHES.

    Raises:
        MixedRowsError: computing one microbatch requires a value of all microbatches.
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

    # Dependencies

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
                raise MixedRowsError(f"{node.outputs[0]}: rows are found by their place in the full batch")
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
        """Record a step along MICROBATCHES, which the host performs."""
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
                    f"{self.said(source)} depends on all rows of the batch, and its rows are needed one by one"
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
        """The graph that computes the values of some totals for one microbatch; sets the totals' sources to its output
        names."""
        sources = list(dict.fromkeys(total.source for total in totals.values()))
        graph = self.part(sources)
        found = dict(zip(sources, graph.outputs, strict=True))
        totals |= {name: total._replace(source=found[total.source]) for name, total in totals.items()}
        graph.outputs = list(dict.fromkeys(graph.outputs))
        return graph

    def part(self, roots: Sequence[Name], outputs: Sequence[Name] | None = None, is_once: bool = False) -> Graph:
        """The graph that computes some values from those that other graphs provide."""

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
        """Compute values that depend on the position of a microbatch from its index."""
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
        """Indices of the nodes that compute some values, and the names of the network inputs and given values that they
        read."""
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
    """Describe an operator in messages."""
    place = node.path or (node.scope.cell if node.scope else "")
    direction = "the gradient of " if node.scope and node.scope.is_backward else ""
    return f"{node.kind} in {direction}{place or 'the network'}"


def _reads_after_writes(graph: Graph) -> set[int]:
    """Indices of the nodes that read a parameter after an operator of the same graph has written it."""
    number_of = {
        i: number for number, i in enumerate(i for i, node in enumerate(graph.nodes) if is_effect(node, graph))
    }
    writers: dict[Name, int] = {}
    """Parameter -> writes of it, as a bit mask."""
    behind: dict[Name, int] = {}
    """Value -> writes that happen before it, as a bit mask."""
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
