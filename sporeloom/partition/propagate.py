# SPDX-License-Identifier: Apache-2.0
"""Walks a graph once, in order, with a layout for every value, and writes what each rank computes.

The result is one graph for all ranks: what differs between them are groups, `RankOffset`s and `IsFirst`s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sporeloom.partition.decompositions import DECOMPOSITIONS
from sporeloom.partition.graph import Graph, Input, IsFirst, Name, Node, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout, fitted, replicated
from sporeloom.partition.operation import Operand, Operands, Operation, Plan, computed_unsharded
from sporeloom.partition.operators import plan as plan_of
from sporeloom.partition.redistribute import Step, redistribution
from sporeloom.strategy.layout import Dim, Layout, Shape

STRUCTURE = ("UpdateState", "MakeTuple", "TupleGetItem", "Return")
"""Nodes that order or pack others: what they get is passed on as it is."""
READERS = ("BatchNorm",)
"""Operators that may write some input, but not their first one."""
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
"""Elements that a rank sends by the usual ring or pairwise algorithm, of what it holds afterwards."""


class PartitionError(ValueError):
    """The graph cannot be sharded so."""


@dataclass(slots=True)
class Communication:
    """A collective, and why it is there."""

    kind: str
    axes: Dim
    elements: int
    """That a rank sends."""
    dtype: str
    value: Name
    consumer: str
    """Path or name of the operator that wants the value laid out otherwise."""


@dataclass(slots=True)
class ShardedGraph:
    """What every rank computes, and how its values lie."""

    graph: Graph
    layouts: dict[Name, ValueLayout]
    """Of the values of the graph it came from."""
    communications: list[Communication] = field(default_factory=list)
    unsharded: Counter[str] = field(default_factory=Counter)
    """Kinds of operators that every rank computes whole, for want of a handler, and how many of each had a sharded input."""


@dataclass(slots=True)
class _Value:
    type: TensorType | None
    layout: ValueLayout | None
    name: Name
    constant: Any = None
    is_constant: bool = False
    is_parameter: bool = False


def shard_graph(
    graph: Graph,
    grid: DeviceGrid,
    parameters: Mapping[Name, Layout],
    inputs: Mapping[Name, Layout],
    pinned: Mapping[str, Sequence[Layout]] | None = None,
) -> ShardedGraph:
    """Shard `graph` over `grid`.

    Args:
        parameters: dims of those that are sharded; the others are replicated.
        inputs: dims by which what every rank is given whole is sharded at once.
        pinned: path of an operator -> dims of its inputs, whatever they are otherwise.

    Raises:
        PartitionError: an operator writes a sharded parameter in a way that is not known.
    """
    walk = _Walk(graph, grid, parameters, inputs, pinned or {})
    return walk.run()


class _Walk:
    def __init__(
        self,
        graph: Graph,
        grid: DeviceGrid,
        parameters: Mapping[Name, Layout],
        inputs: Mapping[Name, Layout],
        pinned: Mapping[str, Sequence[Layout]],
    ):
        self.source, self.grid, self.pinned = graph, grid, pinned
        self.values: dict[Name, _Value] = {}
        self.moved: dict[Name, dict[ValueLayout, Name]] = {}
        self.result = ShardedGraph(Graph({}, dict(graph.inputs), [], []), {})
        self.consumer = ""
        self.rewritten = Node("", (), (), ())
        self._serial = 0
        for name, type in graph.parameters.items():
            layout = ValueLayout(parameters.get(name, ((),) * len(type.shape)))
            self.values[name] = _Value(type, layout, name, is_parameter=True)
            self.result.graph.parameters[name] = self.local(type, layout)
        for name, type in graph.inputs.items():
            self.values[name] = _Value(type, replicated(len(type.shape)), name)
            dims = fitted(inputs.get(name, ((),) * len(type.shape)), type.shape, grid)
            sharded = ValueLayout(dims)
            self.values[name] = _Value(type, sharded, self.laid_out(name, sharded))
            self.moved.clear()

    def run(self) -> ShardedGraph:
        for node in self.source.nodes:
            self.consumer = node.path or node.outputs[0]
            self.visit(node)
        self.consumer = "an output of the graph"
        for name in self.source.outputs:
            self.result.graph.outputs.append(self.laid_out(name, _whole(self.values[name].type)))
        self.result.layouts = {name: value.layout for name, value in self.values.items() if value.layout is not None}
        return self.result

    def visit(self, node: Node) -> None:
        if node.kind == "Constant":
            self.add_constant(node)
        elif node.kind in STRUCTURE:
            self.copy(node, [self.as_it_is(each) for each in node.inputs], [None] * len(node.outputs))
        elif node.kind == "Depend":
            first = self.values[node.inputs[0]] if isinstance(node.inputs[0], str) else None
            layout = first.layout if first else None
            self.copy(node, [self.as_it_is(each) for each in node.inputs], [layout])
        elif node.kind == "AddN":
            self.add_up(node)
        elif node.kind in DECOMPOSITIONS and (names := DECOMPOSITIONS[node.kind](self, node)):
            self.values |= {output: self.values[name] for output, name in zip(node.outputs, names, strict=False)}
        elif node.attributes.get("side_effect_hidden"):
            drawn = self.drawn(node, tuple(node.flat_inputs()))
            self.values |= {output: self.values[name] for output, name in zip(node.outputs, drawn, strict=True)}
        elif node.attributes.get("side_effect_mem") and (plan := self.updating(node)):
            self.compute(node, plan)
            self.moved.pop(next(node.flat_inputs()), None)  # copies of what was there before
        elif plan := plan_of(op := self.operation(node)):
            self.compute(node, plan)
        else:
            self.compute_unsharded(node, op)

    # What a node is given

    def operand(self, name: Name) -> Operand:
        value = self.values[name]
        return Operand(value.type, value.layout, value.constant, value.is_constant, value.is_parameter)

    def operation(self, node: Node) -> Operation:
        if node.path in self.pinned:
            self.pin(node)
        operands: list[Operands] = [
            self.operand(each) if isinstance(each, str) else tuple(map(self.operand, each)) for each in node.inputs
        ]
        return Operation(node.kind, tuple(operands), node.types, node.attributes, self.grid)

    def pin(self, node: Node) -> None:
        """Lay the inputs out as a rule says; for all later users, too. Not parameters: who writes one wants itself."""
        for name, dims in zip(node.flat_inputs(), self.pinned[node.path], strict=False):
            value = self.values[name]
            if value.type is not None and value.layout is not None and not (value.is_constant or value.is_parameter):
                target = ValueLayout(fitted(dims, value.type.shape, self.grid))
                self.values[name] = _Value(value.type, target, self.laid_out(name, target))

    def as_it_is(self, given: Input) -> Input:
        return self.values[given].name if isinstance(given, str) else tuple(self.values[name].name for name in given)

    # What comes of it

    def compute(self, node: Node, plan: Plan) -> None:
        """Write the node, its inputs laid out as planned."""
        inputs: list[Input] = []
        for position, (given, wanted) in enumerate(zip(node.inputs, plan.inputs, strict=True)):
            if position in plan.constants:
                inputs.append(self.constant(plan.constants[position]))
            elif isinstance(given, str):
                assert not isinstance(wanted, tuple)
                inputs.append(self.laid_out(given, wanted))
            else:
                assert isinstance(wanted, tuple)
                inputs.append(tuple(self.laid_out(n, w) for n, w in zip(given, wanted, strict=True)))
        if plan.rewrite is None:
            self.copy(node, inputs, plan.outputs, plan.attributes)
            return
        self.rewritten = node
        for name, type, layout, written in zip(
            node.outputs, node.types, plan.outputs, plan.rewrite(self, inputs), strict=True
        ):
            self.values[name] = _Value(type, layout, written)

    def copy(
        self,
        node: Node,
        inputs: Sequence[Input],
        layouts: Sequence[ValueLayout | None],
        changes: Mapping[str, int] | None = None,
    ) -> None:
        types = [
            type if type is None or layout is None else self.local(type, layout)
            for type, layout in zip(node.types, layouts, strict=True)
        ]
        written = replace(node, inputs=tuple(inputs), types=tuple(types), changes=changes or {})
        self.result.graph.nodes.append(written)
        for name, type, layout in zip(node.outputs, node.types, layouts, strict=True):
            self.values[name] = _Value(type, layout, name)

    def add_constant(self, node: Node) -> None:
        type = node.types[0]
        layout = None if type is None else replicated(len(type.shape))
        self.result.graph.nodes.append(node)
        self.values[node.outputs[0]] = _Value(type, layout, node.outputs[0], node.value, is_constant=True)

    def add_up(self, node: Node) -> None:
        """A sum of many: first of those with the same sums pending, so that each of these is communicated once."""
        (items,) = node.inputs
        assert isinstance(items, tuple)
        groups: dict[frozenset[str], list[Name]] = {}
        for name in items:
            layout = self.values[name].layout
            assert layout is not None
            groups.setdefault(layout.partial, []).append(name)
        if len(groups) > 1:
            summed = [group[0] if len(group) == 1 else self.partly_summed(node, group) for group in groups.values()]
            items = tuple(summed)
        whole = Node(node.kind, (items,), node.outputs, node.types, node.attributes, node.path, None, node.origin)
        plan = plan_of(self.operation(whole))
        assert plan is not None
        self.compute(whole, plan)

    def compute_unsharded(self, node: Node, op: Operation) -> None:
        """On every rank. What has the shape of an input that was sharded is sharded so again, and those who use it, too."""
        self.compute(node, self.unsharded(node, op))
        sharded = [o for o in _flat(op.operands) if o.layout and not o.layout.is_replicated]
        if not sharded:
            return
        self.result.unsharded[node.kind] += 1
        for name, type in zip(node.outputs, node.types, strict=True):
            alike = next((o.layout for o in sharded if type and o.shape == type.shape and o.layout), None)
            if type and alike:
                target = alike.reduced()
                self.values[name] = _Value(type, target, self.laid_out(name, target))

    def partly_summed(self, node: Node, names: Sequence[Name]) -> Name:
        name = self.fresh("sum")
        part = Node(node.kind, (tuple(names),), (name,), node.types, node.attributes, "", None, node.origin)
        plan = plan_of(self.operation(part))
        assert plan is not None
        self.compute(part, plan)
        return name

    def unsharded(self, node: Node, op: Operation) -> Plan:
        """For an operator that nothing is known of.

        Raises:
            PartitionError: it is given a sharded parameter itself, not its value: it may write what would be a gathered copy.
        """
        names = node.flat_inputs()
        for name, operand in zip(names, _flat(op.operands), strict=True):
            if operand.is_parameter and operand.layout is not None and operand.layout.axes:
                raise PartitionError(
                    f"{node.kind} ({self.consumer}) is given {name.rpartition(':')[2]} itself and may write it: leave that "
                    "parameter unsharded"
                )
        return computed_unsharded(op)

    def updating(self, node: Node) -> Plan | None:
        """An operator that writes its first input, element by element: all of that shape lie as the parameter does. None if
        that is no parameter.

        Raises:
            PartitionError: it writes something else that is sharded.
        """
        op = self.operation(node)
        target = op.tensor(0)
        if not target.is_parameter:
            self.check_is_last(node)
            return None
        for position, operand in enumerate(_flat(op.operands[1:]), 1):
            if operand.is_parameter and operand.layout != target.layout and operand.layout and operand.layout.axes:
                raise PartitionError(
                    f"{node.kind} ({self.consumer}): input {position + 1} is a parameter sharded otherwise"
                )

        def like_target(operand: Operand) -> ValueLayout | None:
            if operand.type is None:
                return None
            if operand.shape == target.shape:
                return ValueLayout(target.dims)
            if target.layout is not None and target.layout.axes and operand.type.num_elements > 1:
                raise PartitionError(
                    f"{node.kind} ({self.consumer}): writes a sharded parameter of shape {target.shape} by a value of shape "
                    f"{operand.shape}; leave that parameter unsharded"
                )
            return replicated(len(operand.shape))

        wanted = tuple(
            like_target(each) if isinstance(each, Operand) else tuple(map(like_target, each)) for each in op.operands
        )
        outputs = tuple(
            None
            if type is None
            else ValueLayout(target.dims)
            if type.shape == target.shape
            else replicated(len(type.shape))
            for type in node.types
        )
        return Plan(wanted, outputs)

    def check_is_last(self, node: Node) -> None:
        """What is written is a value: the rank may write a copy, if nobody else looks at it.

        Raises:
            PartitionError: somebody may.
        """
        written = next(node.flat_inputs())
        users = [each for each in self.source.nodes if each is not node and written in each.flat_inputs()]
        if node.kind not in READERS and any(each.kind not in STRUCTURE for each in users):
            raise PartitionError(
                f"{node.kind} ({self.consumer}) writes a value that others use, too: use the operator that returns a new one"
            )

    # Layouts

    def local(self, type: TensorType, layout: ValueLayout) -> TensorType:
        return TensorType(layout.local_shape(type.shape, self.grid), type.dtype)

    def laid_out(self, name: Name, wanted: ValueLayout | None) -> Name:
        """What holds a value in a layout."""
        value = self.values[name]
        if value.type is None or value.layout is None or wanted is None or value.layout == wanted:
            return value.name
        copies = self.moved.setdefault(value.name, {})
        if wanted not in copies:
            written = value.name
            for step in redistribution(value.layout, wanted, self.grid):
                written = self.step(written, value.type, step)
            copies[wanted] = written
        return copies[wanted]

    def step(self, name: Name, type: TensorType, step: Step) -> Name:
        kind = COLLECTIVE_OF[step.kind]
        attributes: dict[str, Any] = {"axes": step.axes, "dim": step.dim, "to_dim": step.to_dim, "op": "sum"}
        return self.node(kind, [name], [self.local(type, step.layout)], attributes)[0]

    # A builder, for decompositions

    def type_of(self, name: Name) -> TensorType:
        type = self.values[name].type
        assert type is not None, name
        return type

    def value_of(self, name: Name) -> Any:
        if not self.values[name].is_constant:
            raise PartitionError(f"{self.consumer}: an input that must be known is computed")
        return self.values[name].constant

    def put(self, kind: str, inputs: Sequence[Any], shape: Shape, dtype: str = "") -> Name:
        type = TensorType(shape, dtype or self.type_of(inputs[0]).dtype)
        names = tuple(each if isinstance(each, str) else self.known(each, type.dtype) for each in inputs)
        self.visit(Node(kind, names, (name := self.fresh(kind),), (type,)))
        return name

    def known(self, value: Any, dtype: str) -> Name:
        type = TensorType((), dtype) if isinstance(value, float) else None
        self.add_constant(Node("Constant", (), (name := self.fresh("constant"),), (type,), value=value))
        return name

    def update(self, parameter: Name, value: Name, monad: Name, result: Name) -> Name:
        type, written, waiting = self.type_of(parameter), self.fresh("Assign"), self.fresh("Depend")
        writes = {"side_effect_mem": True}
        self.visit(Node("Assign", (parameter, value, monad), (written,), (type,), writes))
        self.visit(Node("Depend", (result, written), (waiting,), (self.type_of(result),)))
        return waiting

    def drawn(self, node: Node, inputs: Sequence[Name]) -> tuple[Name, ...]:
        """Every rank draws all of it, and what all but the first one have counts for nothing: its sum is pending.

        Raises:
            PartitionError: it draws whole numbers.
        """
        whole = [self.laid_out(name, _whole(self.values[name].type)) for name in inputs]
        outputs = self.fresh_outputs(node)
        self.result.graph.nodes.append(replace(node, inputs=tuple(whole), outputs=outputs))
        axes, agreed = tuple(self.grid.degrees), []
        for name, type in zip(outputs, node.types, strict=True):
            if type is None or not type.dtype.startswith(("float", "bfloat")):
                raise PartitionError(
                    f"{node.kind} ({self.consumer}) draws what are no floating-point numbers, and ranks would not draw the "
                    "same: draw floats and convert them"
                )
            (first,) = self.node("Mul", [name, self.constant(IsFirst(axes), TensorType((), type.dtype))], [type])
            self.values[first] = _Value(type, ValueLayout(((),) * len(type.shape), frozenset(axes)), first)
            agreed.append(first)
        return tuple(agreed)

    # An emitter, for handlers that write other nodes

    def fresh(self, hint: str) -> Name:
        self._serial += 1
        return f"{hint}.{self._serial}"

    def fresh_outputs(self, node: Node) -> tuple[Name, ...]:
        """Names like those of a node's outputs: items of a tuple have numbers."""
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
        self.result.graph.nodes.append(Node(kind, tuple(inputs), outputs, tuple(types), attributes or {}))
        if kind in SENT and attributes is not None:
            axes, (type,), (value,) = attributes["axes"], types, inputs
            sent = int(SENT[kind](type.num_elements, self.grid.degree(axes)))
            self.result.communications.append(Communication(kind, axes, sent, type.dtype, str(value), self.consumer))
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


def _whole(type: TensorType | None) -> ValueLayout | None:
    return None if type is None else replicated(len(type.shape))


def _flat(operands: Sequence[Operands]) -> list[Operand]:
    return [each for operand in operands for each in (operand if isinstance(operand, tuple) else (operand,))]
