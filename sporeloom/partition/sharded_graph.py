# SPDX-License-Identifier: Apache-2.0
"""State of sharding: every value in each of its layouts, and the nodes and collectives emitted so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sporeloom.partition.graph import Graph, Input, Name, Node, Scope, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.redistribute import Step, redistribution
from sporeloom.strategy.layout import Dim

COLLECTIVE_OF = {
    "slice": "SliceOfRank",
    "all_reduce": "AllReduce",
    "reduce_scatter": "ReduceScatter",
    "all_gather": "AllGather",
    "all_to_all": "AllToAll",
}

SENT: dict[str, Callable[[int, int], int]] = {
    "AllReduce": lambda held, ranks: 2 * held * (ranks - 1) // ranks,
    "ReduceScatter": lambda held, ranks: held * (ranks - 1),
    "AllGather": lambda held, ranks: held * (ranks - 1) // ranks,
    "AllToAll": lambda held, ranks: held * (ranks - 1) // ranks,
}
"""Elements that a rank sends in the usual ring or pairwise algorithm, from the local size of the result."""


class PartitionError(ValueError):
    """The graph cannot be sharded as requested."""


class MixedRowsError(PartitionError):
    """Results for one microbatch depend on rows of other microbatches."""


@dataclass(slots=True)
class Communication:
    """A collective, and the operator that it is for."""

    kind: str
    axes: Dim
    elements: int
    """Number of elements that a rank sends."""
    dtype: str
    value: Name
    consumer: str
    """Path or name of the operator that requires the new layout."""
    result: Name = ""
    """Name of the result."""


@dataclass(slots=True)
class ShardedGraph:
    """The graph that every rank runs, and the layouts of its values."""

    graph: Graph
    layouts: dict[Name, ValueLayout]
    """Layouts of the values of the source graph."""
    communications: list[Communication] = field(default_factory=list)
    unsharded: Counter[str] = field(default_factory=Counter)
    """Kinds of operators without a handler, which every rank computes in full -> how many of them had a sharded input."""
    made: dict[Name, tuple[Name, ValueLayout]] = field(default_factory=dict)
    """Value of the source graph, unless it is a parameter or from another graph -> the name and the layout in which the
    ranks have it first."""

    def within(self, graphs: Iterable[Graph]) -> list[Communication]:
        """The collectives in graphs that are pieces of this one."""
        known = {each.result: each for each in self.communications}
        return [known[n] for graph in graphs for node in graph.nodes for n in node.outputs if n in known]

    def summary(self, who: str = "each rank") -> str:
        """Report the data that a rank sends, and the operators that every rank computes in full."""
        sent = sum(each.elements * item_size(each.dtype) for each in self.communications)
        text = f"{who} sends {sent / 1e6:.3g} MB in {len(self.communications)} collectives"
        if not self.unsharded:
            return text
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.unsharded.most_common())
        return f"{text}; computed whole on every rank, for which there is no rule: {kinds}"


def item_size(dtype: str) -> int:
    """Size of an element in bytes."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


@dataclass(slots=True)
class Value:
    """A value: its type, its current layout, and its copies in other layouts."""

    type: TensorType | None
    layout: ValueLayout | None
    name: Name
    constant: Any = None
    is_constant: bool = False
    is_parameter: bool = False
    copies: dict[ValueLayout, Name] = field(default_factory=dict)
    """Names of the value in all other layouts in which the ranks have it."""
    remake: Callable[[ValueLayout], Name | None] | None = None


class Held:
    """Values by their names in the source graph; also the `Emitter` for handlers that rewrite operators."""

    def __init__(self, source: Graph, grid: DeviceGrid):
        self.source, self.grid = source, grid
        self.values: dict[Name, Value] = {}
        self.result = ShardedGraph(Graph({}, dict(source.inputs), [], []), {})
        self.consumer = ""
        """Path or name of the operator that is being sharded."""
        self.scope: Scope | None = None
        """Scope of that operator; None while its inputs are redistributed, because such steps belong to the values."""
        self.rewritten = Node("", (), (), ())
        """The operator that a handler is rewriting."""
        self.remade: dict[Name, tuple[Name, ValueLayout]] = {}
        """Value -> what computes it in another layout, the first of several."""
        self._serial = 0

    # Layouts

    def local(self, type: TensorType, layout: ValueLayout) -> TensorType:
        return TensorType(layout.local_shape(type.shape, self.grid), type.dtype)

    def laid_out(self, name: Name, wanted: ValueLayout | None) -> Name:
        """Return the name of a value in a layout; redistribute it if needed."""
        value = self.values[name]
        if value.type is None or value.layout is None or wanted is None or value.layout == wanted:
            return value.name
        scope, self.scope = self.scope, None
        try:
            return self._copied(name, value, wanted)
        finally:
            self.scope = scope

    def _copied(self, name: Name, value: Value, wanted: ValueLayout) -> Name:
        if wanted not in value.copies and value.remake and (made := value.remake(wanted)):
            value.copies[wanted] = made
            self.remade.setdefault(value.name, (made, wanted))
        assert value.type is not None and value.layout is not None
        if wanted not in value.copies:
            source, steps = self.nearest(value, wanted)
            for step in steps:
                source = self.step(source, value.type, step)
            value.copies[wanted] = source
            if wanted.partial < value.layout.partial:  # so that no later user reduces it again
                copies = {**value.copies, value.layout: value.name}
                self.values[name] = replace(value, layout=wanted, name=source, copies=copies)
                return source
        return value.copies[wanted]

    def leave_out_remade(self) -> None:
        """Remove operators whose results all users have in other layouts: executors leave them out."""
        graph = self.result.graph
        used = {*graph.outputs, *(name for node in graph.nodes for name in node.flat_inputs())}
        unused = {name: made for name, made in self.remade.items() if name not in used}
        graph.nodes = [node for node in graph.nodes if node.outputs[0] not in unused]
        for name, made in self.result.made.items():
            while made[0] in unused:
                made = unused[made[0]]
            self.result.made[name] = made

    def lay_out(self, name: Name, wanted: ValueLayout) -> None:
        """Redistribute a value for all later users."""
        written, value = self.laid_out(name, wanted), self.values[name]
        if value.layout is not None and value.layout != wanted:
            copies = {value.layout: value.name, **value.copies}
            self.values[name] = replace(value, layout=wanted, name=written, copies=copies)

    def nearest(self, value: Value, wanted: ValueLayout) -> tuple[Name, list[Step]]:
        """The copy of a value from which redistribution sends the fewest elements, and the steps from it to the target."""
        assert value.layout is not None and value.type is not None
        found = [(value.name, redistribution(value.layout, wanted, self.grid))]
        found += [
            (name, redistribution(layout, wanted, self.grid))
            for layout, name in value.copies.items()
            if wanted.partial <= layout.partial
        ]
        num_elements = value.type.num_elements

        def sent(steps: list[Step]) -> int:
            """Elements that a rank sends."""
            return sum(
                int(SENT[kind](num_elements // self.grid.degree(step.layout.axes), self.grid.degree(step.axes)))
                for step in steps
                if (kind := COLLECTIVE_OF[step.kind]) in SENT
            )

        return min(found, key=lambda each: sent(each[1]))

    def step(self, name: Name, type: TensorType, step: Step) -> Name:
        kind = COLLECTIVE_OF[step.kind]
        attributes: dict[str, Any] = {"axes": step.axes, "dim": step.dim, "to_dim": step.to_dim, "op": "sum"}
        return self.node(kind, [name], [self.local(type, step.layout)], attributes)[0]

    # An emitter, for handlers that write other nodes

    def fresh(self, hint: str) -> Name:
        self._serial += 1
        return f"{hint}.{self._serial}"

    def fresh_outputs(self, node: Node) -> tuple[Name, ...]:
        """New names in the form of a node's outputs: the items of a tuple are numbered."""
        name = self.fresh(node.kind)
        is_tuple = len(node.outputs) > 1 or "#" in node.outputs[0]
        return tuple(f"{name}#{i}" for i in range(len(node.outputs))) if is_tuple else (name,)

    def node(
        self,
        kind: str,
        inputs: Sequence[Input],
        types: Sequence[TensorType],
        attributes: Mapping[str, Any] | None = None,
    ) -> tuple[Name, ...]:
        outputs = tuple(self.fresh(kind) for _ in types)
        self.result.graph.nodes.append(
            Node(kind, tuple(inputs), outputs, tuple(types), attributes or {}, scope=self.scope)
        )
        if kind in SENT and attributes is not None:
            axes, (type,), (value,) = attributes["axes"], types, inputs
            sent = int(SENT[kind](type.num_elements, self.grid.degree(axes)))
            self.result.communications.append(
                Communication(kind, axes, sent, type.dtype, str(value), self.consumer, outputs[0])
            )
        return outputs

    def operator(self, inputs: Sequence[Input], types: Sequence[TensorType]) -> tuple[Name, ...]:
        outputs = self.fresh_outputs(self.rewritten)
        self.result.graph.nodes.append(
            replace(self.rewritten, inputs=tuple(inputs), outputs=outputs, types=tuple(types))
        )
        return outputs

    def constant(self, value: Any, type: TensorType | None = None) -> Name:
        (name,) = outputs = (self.fresh("constant"),)
        self.result.graph.nodes.append(Node("Constant", (), outputs, (type,), value=value))
        return name
