# SPDX-License-Identifier: Apache-2.0
"""Sharding propagation: visits a graph once in topological order, chooses a layout for every value, and emits local
operators.

The result is one SPMD graph for all ranks: they differ in communication groups, `RankOffset`s and `IsFirst`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sporeloom.partition.decompositions import DECOMPOSITIONS
from sporeloom.partition.gradient_order import gradients_when_due
from sporeloom.partition.graph import Graph, Input, IsFirst, Name, Node, TensorType
from sporeloom.partition.grid import MICROBATCHES, STAGES, DeviceGrid
from sporeloom.partition.hints import casts_of_outputs, wanted_by_updates
from sporeloom.partition.layout import ValueLayout, fitted, replicated
from sporeloom.partition.operand_layouts import OperandLayouts, by_microbatch
from sporeloom.partition.operation import Operand, Operands, Operation, Pin, Plan, computed_unsharded
from sporeloom.partition.operators import CONTRACTIONS
from sporeloom.partition.operators import plan as plan_of
from sporeloom.partition.sharded_graph import PartitionError, ShardedGraph, Value
from sporeloom.strategy.layout import Layout

STRUCTURE = ("UpdateState", "MakeTuple", "TupleGetItem", "Return")
"""Nodes that order or pack values: their inputs are passed on unchanged."""
READERS = ("BatchNorm",)
"""Operators that may write an input other than their first."""


def shard_graph(
    graph: Graph,
    grid: DeviceGrid,
    parameters: Mapping[Name, Layout],
    inputs: Mapping[Name, Layout],
    pinned: Mapping[str, Pin] | None = None,
    held: Mapping[Name, ValueLayout] | None = None,
    gathers_outputs: bool = True,
    *,
    reshards: bool = False,
    scattered: Mapping[Name, Layout] | None = None,
) -> ShardedGraph:
    """Shard `graph` over `grid`.

    Args:
        parameters: layouts of the sharded parameters; the others are replicated.
        inputs: layouts by which inputs, which every rank receives in full, are sliced first.
        pinned: path of an operator -> layouts from a sharding rule, which override propagation.
        held: layouts of inputs that each rank receives as local shards or partial sums from another graph.
        gathers_outputs: whether every rank returns full outputs; otherwise a loss and gradients keep their layouts.
        reshards: whether parameters are gathered anew for the forward and the backward pass, each time not before the other
            inputs of their first user are there, so that a rank never has all of them gathered.
        scattered: gradients, or summands of them -> layouts of their parameters, like which they are reduce-scattered.

    Raises:
        PartitionError: an unsupported operator writes a sharded parameter, or a rule does not match its operator.
    """
    walk = _Walk(graph, grid, parameters, inputs, pinned or {}, held or {})
    walk.reshards, walk.scattered = reshards, dict(scattered or {})
    if not gathers_outputs:
        walk.keeping_sums = casts_of_outputs(graph, first=1)
    return walk.run(gathers_outputs)


class _Walk(OperandLayouts):
    def __init__(
        self,
        graph: Graph,
        grid: DeviceGrid,
        parameters: Mapping[Name, Layout],
        inputs: Mapping[Name, Layout],
        pinned: Mapping[str, Pin],
        held: Mapping[Name, ValueLayout],
    ):
        super().__init__(graph, grid, pinned)
        self.wanted = wanted_by_updates(graph, parameters)
        for name, type in graph.parameters.items():
            layout = ValueLayout(parameters.get(name, ((),) * len(type.shape)))
            self.values[name] = Value(type, layout, name, is_parameter=True)
            self.result.graph.parameters[name] = self.local(type, layout)
        for name, type in graph.inputs.items():
            if name in held:
                self.values[name] = Value(type, held[name], name)
                self.result.graph.inputs[name] = self.local(type, held[name])
                continue
            self.values[name] = Value(type, replicated(len(type.shape)), name)
            dims = fitted(inputs.get(name, ((),) * len(type.shape)), type.shape, grid)
            self.lay_out(name, ValueLayout(dims))
            self.result.made[name] = name, ValueLayout(dims)

    def run(self, gathers_outputs: bool) -> ShardedGraph:
        for node in self.source.nodes:
            self.consumer, self.scope = node.path or node.outputs[0], node.scope
            if not self.is_repeated(node):
                self.visit(node)
            for name in node.outputs:
                if (value := self.values[name]).layout is not None:
                    self.result.made[name] = value.name, value.layout
            self.note(node)
            self.scatter(node)
        self.consumer = "an output of the graph"
        for name in self.source.outputs:
            wanted = _whole(self.values[name].type) if gathers_outputs else self.values[name].layout
            self.result.graph.outputs.append(self.laid_out(name, wanted))
        if self.scattered and not self.reshards:  # else gathers, for which products wait, would wait for scatters
            self.result.graph.nodes = gradients_when_due(self.result.graph)
        self.leave_out_remade()
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
        elif (
            node.kind in DECOMPOSITIONS
            and not self.operation(node).is_dynamic
            and (names := DECOMPOSITIONS[node.kind](self, node))
        ):
            self.values |= {output: self.values[name] for output, name in zip(node.outputs, names, strict=False)}
        elif node.attributes.get("side_effect_hidden"):
            drawn = self.drawn(node, tuple(node.flat_inputs()))
            self.values |= {output: self.values[name] for output, name in zip(node.outputs, drawn, strict=True)}
        elif node.attributes.get("side_effect_mem") and (plan := self.as_pinned(node) or self.updating(node)):
            self.compute(node, plan)
            for name in node.flat_inputs():
                if self.values[name].is_parameter:
                    self.values[name].copies.clear()  # they have the old value
                    self.forget(name)
        else:
            self.compute_sharded(node)

    def compute_sharded(self, node: Node) -> None:
        """Compute an operator as planned by a rule or its handler, or else unsharded on every rank."""
        op = self.operation(node)
        plan = self.as_pinned(node) or plan_of(op)
        if plan is not None and self.reduce_as_wanted(node, plan):
            op = self.operation(node)
            plan = self.as_pinned(node) or plan_of(op)
        if plan is not None:
            if node.again in self.forward:
                self.original |= zip(node.outputs, self.forward[node.again][0].outputs, strict=True)
            elif not node.forward:
                self.forward[node.outputs[0]] = node, plan
            self.compute(node, plan)
        else:
            self.compute_unsharded(node, op)

    def reduce_as_wanted(self, node: Node, plan: Plan) -> bool:
        """Reduce inputs that the plan needs without partial sums, where each rank later needs only its shard: scatter them
        over the axes that are reduced, or cut them before they are. Returns whether any was reduced."""
        found = False
        for name, wanted in zip(node.inputs, plan.inputs, strict=True):
            if not isinstance(name, str) or not isinstance(wanted, ValueLayout) or name not in self.wanted:
                continue
            value, dims = self.values[name], self.wanted[name]
            if value.type is None or value.layout is None:
                continue
            target = ValueLayout(fitted(dims, value.type.shape, self.grid))
            if value.layout.partial - wanted.partial and target.axes - value.layout.axes:
                self.lay_out(name, target)
                found = True
        return found

    def as_it_is(self, given: Input) -> Input:
        return self.values[given].name if isinstance(given, str) else tuple(self.values[name].name for name in given)

    def compute(self, node: Node, plan: Plan) -> None:
        """Emit a node as planned, with its inputs redistributed."""
        inputs: list[Input] = []
        for position, (given, wanted) in enumerate(zip(node.inputs, plan.inputs, strict=True)):
            if position in plan.constants:
                assert isinstance(given, str)
                inputs.append(self.constant_like(given, plan.constants[position]))
            elif isinstance(given, str):
                assert not isinstance(wanted, tuple)
                given = self.when_due(node, self.as_of_now(node, given, wanted), wanted)
                inputs.append(self.laid_out(given, wanted))
            else:
                assert isinstance(wanted, tuple)
                inputs.append(tuple(self.laid_out(n, w) for n, w in zip(given, wanted, strict=True)))
        if plan.rewrite is None:
            self.copy(node, inputs, plan.outputs, plan.attributes)
        else:
            self.rewritten = node
            for name, type, layout, written in zip(
                node.outputs, node.types, plan.outputs, plan.rewrite(self, inputs), strict=True
            ):
                self.values[name] = Value(type, layout, written)
        if plan.remake:
            self.values[node.outputs[0]].remake = partial(plan.remake, self, inputs)
        pin = self.pinned.get(node.path)
        if shared := self.sums_of_products.get(node.outputs[0]):  # the sum is laid out, not the products
            pin = None if node.kind in CONTRACTIONS else shared
        further = pin.outputs if pin and pin.outputs and not pin.local else ()
        for name, type, dims in zip(node.outputs, node.types, further, strict=False):
            if type is not None and len(type.shape) == len(dims):
                self.lay_out(name, ValueLayout(fitted(by_microbatch(dims, self.values[name]), type.shape, self.grid)))

    def as_of_now(self, node: Node, given: Name, wanted: ValueLayout | None) -> Name:
        """An input that is a parameter read in place: if it must be redistributed, the copy is made only after the
        operator's dependencies, such as an update of the parameter."""
        value, last = self.values[given], list(node.flat_inputs())[-1]
        is_copied = value.is_parameter and wanted is not None and wanted != value.layout
        return self.wait(given, last) if is_copied and node.attributes.get("side_effect_mem") else given

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
            self.values[name] = Value(type, layout, name)

    def constant_like(self, name: Name, value: Any) -> Name:
        """The local value of a constant, as a tensor if the constant is one."""
        type = self.values[name].type
        return self.constant(value) if type is None else self.constant(np.array(value, type.dtype), type)

    def add_up(self, node: Node) -> None:
        """Add several values: first those with the same partial sums, so that each of these is communicated once."""
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
        self.compute_sharded(replace(node, inputs=(items,)))

    def compute_unsharded(self, node: Node, op: Operation) -> None:
        """Compute an operator on every rank. Outputs with the shape of a sharded input are sharded like it again, for
        all later users."""
        self.compute(node, self.unsharded(node, op))
        sharded = [o for o in _flat(op.operands) if o.layout and not o.layout.is_replicated]
        if not sharded:
            return
        self.result.unsharded[node.kind] += 1
        for name, type in zip(node.outputs, node.types, strict=True):
            alike = next((o.layout for o in sharded if type and o.shape == type.shape and o.layout), None)
            if type and alike:
                self.lay_out(name, alike.reduced())

    def partly_summed(self, node: Node, names: Sequence[Name]) -> Name:
        name = self.fresh("sum")
        part = replace(node, inputs=(tuple(names),), outputs=(name,), path="")
        self.compute_sharded(part)
        return name

    def unsharded(self, node: Node, op: Operation) -> Plan:
        """Plan an operator without a handler.

        Raises:
            PartitionError: it takes a sharded parameter by reference and may write it, but would write a gathered copy.
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
        """Plan an operator that writes its first input element by element: all values of that shape get the parameter's
        layout. None if that input is not a parameter.

        Raises:
            PartitionError: it writes another sharded value.
        """
        op = self.operation(node)
        target = op.tensor(0)
        if not target.is_parameter:
            self.check_is_last(node)
            return None
        names = list(node.flat_inputs())
        for name, operand in zip(names[1:], _flat(op.operands[1:]), strict=True):
            if not operand.is_parameter or operand.layout is None or operand.layout == target.layout:
                continue
            if operand.shape == target.shape or operand.layout.axes:
                weight, other = (each.rpartition(":")[2] for each in (names[0], name))
                raise PartitionError(
                    f"{node.kind} ({self.consumer}): the parameter {other} is not sharded as {weight} is, and may be "
                    "written, too: what an optimizer keeps of a weight is sharded as that is if its name is "
                    f"PREFIX.{weight}"
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
        """Check that an operator that writes a value is its last user, so that writing a copy has the same effect.

        Raises:
            PartitionError: the value has other users.
        """
        written = next(node.flat_inputs())
        users = [each for each in self.source.nodes if each is not node and written in each.flat_inputs()]
        if node.kind not in READERS and any(each.kind not in STRUCTURE for each in users):
            raise PartitionError(
                f"{node.kind} ({self.consumer}) writes a value that others use, too: use the operator that returns a new one"
            )

    def drawn(self, node: Node, inputs: Sequence[Name]) -> tuple[Name, ...]:
        """Draw random numbers in full on every rank, and keep those of the first: a partial sum in which all others are
        zero.

        Raises:
            PartitionError: it draws integers.
        """
        whole = [self.laid_out(name, _whole(self.values[name].type)) for name in inputs]
        outputs = self.fresh_outputs(node)
        self.result.graph.nodes.append(replace(node, inputs=tuple(whole), outputs=outputs))
        axes, agreed = tuple(axis for axis in self.grid.degrees if axis not in (STAGES, MICROBATCHES)), []
        for name, type in zip(outputs, node.types, strict=True):
            if type is None or not type.dtype.startswith(("float", "bfloat")):
                raise PartitionError(
                    f"{node.kind} ({self.consumer}) draws values that are not floating-point, and ranks would not draw the "
                    "same: draw floats and convert them"
                )
            (first,) = self.node("Mul", [name, self.constant(IsFirst(axes), TensorType((), type.dtype))], [type])
            self.values[first] = Value(type, ValueLayout(((),) * len(type.shape), frozenset(axes)), first)
            agreed.append(first)
        return tuple(agreed)


def _whole(type: TensorType | None) -> ValueLayout | None:
    return None if type is None else replicated(len(type.shape))


def _flat(operands: Sequence[Operands]) -> list[Operand]:
    return [each for operand in operands for each in (operand if isinstance(operand, tuple) else (operand,))]
