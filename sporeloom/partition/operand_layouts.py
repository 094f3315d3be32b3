# SPDX-License-Identifier: Apache-2.0
"""The inputs of a node as the planner of its operator gets them: in the layouts of a rule, of the forward pass, or as they
are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sporeloom.partition.graph import Graph, Name, Node
from sporeloom.partition.grid import MICROBATCHES, DeviceGrid
from sporeloom.partition.hints import ids_by_row, summed_with, sums_of_products
from sporeloom.partition.layout import NONE, ValueLayout, fitted
from sporeloom.partition.operation import Operand, Operands, Operation, Pin, Plan, whole
from sporeloom.partition.operators import CONTRACTIONS, ELEMENTWISE
from sporeloom.partition.operators.elementwise import KEEPS_SUMS
from sporeloom.partition.operators.products import PENDING_BESIDE
from sporeloom.partition.operators.tables import IDS_BY_ROW, TABLE
from sporeloom.partition.resharding import Resharding
from sporeloom.partition.sharded_graph import MixedRowsError, PartitionError, Value
from sporeloom.strategy.layout import Layout, show


class OperandLayouts(Resharding):
    """A traversal of a graph that lays out inputs by rules, and as in the forward pass.

    Args:
        pinned: path of an operator -> layouts from a sharding rule.
    """

    def __init__(self, graph: Graph, grid: DeviceGrid, pinned: Mapping[str, Pin]):
        super().__init__(graph, grid)
        self.pinned = pinned
        self.ids_by_row = ids_by_row(graph)
        self.forward: dict[Name, tuple[Node, Plan]] = {}
        """First output -> operator of the forward pass and its plan."""
        self.summed_with = summed_with(graph)
        self.sums_of_products = sums_of_products(graph, pinned)
        self.keeping_sums: set[Name] = set()
        """Outputs of casts that may keep partial sums pending."""

    def operand(self, name: Name) -> Operand:
        value = self.values[name]
        return Operand(value.type, value.layout, value.constant, value.is_constant, value.is_parameter)

    def operation(self, node: Node) -> Operation:
        is_sum = node.outputs[0] in self.sums_of_products and node.kind not in CONTRACTIONS
        own = self.pin(node) if node.path in self.pinned and not is_sum else self.as_in_forward(node)
        operands: list[Operands] = [
            own.get(each) or self.operand(each) if isinstance(each, str) else tuple(map(self.operand, each))
            for each in node.inputs
        ]
        attributes, ids = node.attributes, node.inputs[1] if len(node.inputs) > 1 else None
        if ids in self.ids_by_row:
            attributes = {**attributes, IDS_BY_ROW: self.ids_by_row[ids]}
        if node.forward in self.forward and self.forward[node.forward][0].kind == "Gather":
            attributes = {**attributes, TABLE: self.forward[node.forward][1].inputs[0]}
        if node.outputs[0] in self.keeping_sums:
            attributes = {**attributes, KEEPS_SUMS: True}
        if beside := self.summed_with.get(node.outputs[0]):
            layouts = [self.values[name].layout for name in beside if name in self.values]
            attributes = {**attributes, PENDING_BESIDE: NONE.union(*(each.partial for each in layouts if each))}
        return Operation(node.kind, tuple(operands), node.types, attributes, self.grid)

    def pinned_inputs(self, node: Node) -> dict[Name, Layout]:
        """The layouts that a rule sets for inputs with at least one dim.

        Raises:
            PartitionError: the rule does not match the inputs.
        """
        pin = self.pinned[node.path]
        types = {name: self.values[name].type for name in node.flat_inputs()}
        tensors = [name for name in node.flat_inputs() if (type := types[name]) is not None and type.shape]
        layouts = [layout for layout in pin.inputs if layout]
        if node.kind == "OneHot" and layouts:  # as in MindSpore, the rule has the layout of the output
            layouts[0] = layouts[0][:-1]
        for name, layout in zip(tensors, layouts, strict=False):
            type = types[name]
            if type is not None and len(layout) != len(type.shape):
                raise PartitionError(
                    f"{pin.source}: {node.path}, {node.kind}: input {tensors.index(name) + 1} has shape {type.shape}, but "
                    f"its layout {show(layout)} has {len(layout)} dims"
                )
        return dict(zip(tensors, layouts, strict=False))

    def pin(self, node: Node) -> dict[Name, Operand]:
        """Redistribute inputs to the layouts of a rule, for all later users. Parameters keep their own layouts for the
        operators that write them, and constants for other operators; returns their redistributed copies for this
        operator."""
        own = {}
        for name, dims in self.pinned_inputs(node).items():
            value = self.values[name]
            assert value.type is not None
            target = ValueLayout(
                fitted(by_microbatch(dims, value), value.type.shape, self.grid), self.kept_sums(node, name)
            )
            if value.is_parameter or value.is_constant or self.is_resharded(name):
                own[name] = replace(self.operand(name), layout=target)
            elif value.layout is not None:
                self.lay_out(name, target)
        return own

    def as_in_forward(self, node: Node) -> dict[Name, Operand]:
        """The inputs of a gradient's operator in the layouts of the forward pass: activations if the ranks still have
        them so; the output's gradient like the output, for contractions and for element-wise operators whose partial
        sum is over axes that shard the output. Otherwise a rank with rows of a gradient and columns of a weight would
        gather the weight, and the gradients further down would be sharded unlike their activations."""
        if node.forward not in self.forward or node.outputs[0] in self.keeping_sums:
            return {}
        forward, plan = self.forward[node.forward]
        before = dict(zip((*forward.inputs, *forward.outputs), (*plan.inputs, *plan.outputs), strict=True))
        contracts, is_elementwise = node.kind in CONTRACTIONS, node.kind in ELEMENTWISE
        own: dict[Name, Operand] = {}
        for name in node.flat_inputs():
            value, wanted = self.values[name], before.get(self.original.get(name, name))
            is_gradient = wanted is None and value.type == forward.types[0]
            wanted = plan.outputs[0] if is_gradient else wanted
            if value.layout is None or not isinstance(wanted, ValueLayout):
                continue
            pending = value.layout.partial
            target = ValueLayout(wanted.dims, pending - wanted.axes if contracts or is_gradient else NONE)
            if is_gradient and (contracts or (is_elementwise and pending & wanted.axes)):
                if self.grid.degree(target.axes) >= self.grid.degree(value.layout.axes):
                    self.lay_out(name, target)  # for all users, such as the gradient of a bias
            elif not contracts and target not in value.copies:
                continue
            own[name] = replace(self.operand(name), layout=target)
        return own

    def as_pinned(self, node: Node) -> Plan | None:
        """Plan an operator that a rule makes local: each rank runs it on its shards, in the layouts of the rule.

        Raises:
            PartitionError: these layouts do not divide the shapes.
        """
        pin = self.pinned.get(node.path)
        if pin is None or not pin.local:
            return None
        wanted = self.pinned_inputs(node)
        if any((layout := self.values[name].layout) and MICROBATCHES in layout.axes for name in wanted):
            raise MixedRowsError(f"{node.path}: its rule lets each rank compute its rows of the batch as it stands")
        said = (*(pin.outputs or ()), *(None for _ in node.types))
        outputs = [None if type is None else layout for type, layout in zip(node.types, said, strict=False)]
        op = self.operation(node)
        sums = self.kept_sums(node, next(node.flat_inputs()))
        inputs = tuple(
            ValueLayout(wanted[name], self.kept_sums(node, name))
            if isinstance(name, str) and name in wanted
            else whole(operand)
            for name, operand in zip(node.inputs, op.operands, strict=True)
        )
        shapes = [
            *((self.values[name].type, dims) for name, dims in wanted.items()),
            *zip(node.types, outputs, strict=True),
        ]
        for type, dims in shapes:
            if type is not None and (dims is None or fitted(dims, type.shape, self.grid) != dims):
                raise PartitionError(
                    f"{pin.source}: {node.path}: shape {type.shape} cannot be sharded by {show(dims or ())}"
                )
        return Plan(inputs, tuple(None if dims is None else ValueLayout(dims, sums) for dims in outputs))

    def kept_sums(self, node: Node, name: Name) -> frozenset[str]:
        """Axes of a partial sum of an input that stay pending although a rule gives its layout: of values that each rank
        gathers from its own, which is linear in them."""
        pin, layout = self.pinned[node.path], self.values[name].layout
        if not pin.local or node.kind != "Gather" or name != next(node.flat_inputs()) or layout is None:
            return NONE
        sharding = frozenset(axis for dims in (*pin.inputs, *(pin.outputs or ())) for dim in dims for axis in dim)
        return layout.partial - sharding


def by_microbatch(dims: Layout, value: Value) -> Layout:
    """The layout of a rule, extended by MICROBATCHES on the dim that it already shards: rules name only axes of ranks."""
    if value.layout is None or MICROBATCHES not in value.layout.axes:
        return dims
    return tuple(
        (MICROBATCHES, *dim) if MICROBATCHES in own else dim for dim, own in zip(dims, value.layout.dims, strict=True)
    )
