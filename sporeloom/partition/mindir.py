# SPDX-License-Identifier: Apache-2.0
"""MindIR of one device to a graph, and a sharded graph to the MindIR of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sporeloom.partition.graph import Graph, Input, IsFirst, Name, Node, RankOffset, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.held import ShardedGraph
from sporeloom.private_names import mind_ir

DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}
CODES = {name: code for code, name in DTYPES.items()}
Proto = mind_ir.AttributeProto
SHAPE = "shape"
ORDERING = ("UpdateState", "Depend")
"""Operators that make others wait."""


class UnreadableGraphError(ValueError):
    """The graph holds what cannot be sharded."""


def read_graph(model: mind_ir.ModelProto) -> Graph:
    """The graph of one device.

    Raises:
        UnreadableGraphError: it branches or loops on values.
    """
    if model.functions:
        raise UnreadableGraphError("the graph calls functions: it has an `if` or `while` on a Tensor")
    return _Reader(model).graph()


class _Reader:
    def __init__(self, model: mind_ir.ModelProto):
        self.model = model
        self.primitives = {p.name: p for p in model.primitives}
        self.attributes = {name: dict(_attributes(p)) for name, p in self.primitives.items()}
        self.tuples: dict[Name, tuple[Name, ...]] = {}
        self.constants: dict[Name, Any] = {}
        self.renamed: dict[Name, Name] = {}
        self.made_by: dict[Name, Name] = {}
        """Items of operators with several outputs -> the operator."""
        self.forward: dict[bytes, Name] = {}
        """By MindSpore's numbers for operators, which their gradients name."""
        self.repeated: dict[int, Name] = {}
        """The same of operators that are recomputed."""

    def graph(self) -> Graph:
        source = self.model.graph
        graph = Graph(
            {p.name: _type(p) for p in source.parameter}, {p.name: _type(p.tensor[0]) for p in source.input}, [], []
        )
        for node in source.node:
            graph.nodes.extend(self.read(node))
        for output in source.output:
            graph.outputs.extend(self.items(output.name))
        return graph

    def items(self, name: Name) -> tuple[Name, ...]:
        """A value, or those of a tuple."""
        if name not in self.tuples:
            return (self.renamed.get(name, name),)
        return tuple(item for each in self.tuples[name] for item in self.items(each))

    def given(self, name: Name) -> Input:
        return self.items(name) if name in self.tuples else self.renamed.get(name, name)

    def read(self, proto: mind_ir.NodeProto) -> Iterator[Node]:
        name = proto.output[0]
        if proto.op_type == "Constant":
            yield self.constant(proto)
            return
        key = proto.op_type.removeprefix("REF::")
        kind = self.primitives[key].op_type
        if kind in ("MakeTuple", "make_list"):
            self.tuples[name] = tuple(proto.input)
        elif kind == "TupleGetItem" and proto.input[0] in self.tuples:
            item = self.tuples[proto.input[0]][self.constants[proto.input[1]]]
            if item in self.tuples:
                self.tuples[name] = self.tuples[item]
            else:
                self.renamed[name] = self.renamed.get(item, item)
        elif kind == "Depend" and proto.input[0] in self.tuples:
            yield from self.depending_items(proto)
        else:
            yield self.operator(proto, kind, self.attributes[key])

    def depending_items(self, proto: mind_ir.NodeProto) -> Iterator[Node]:
        """A tuple that waits for something: each of its items does."""
        items = []
        for position, item in enumerate(self.items(proto.input[0])):
            name = f"{proto.output[0]}#{position}"
            items.append(name)
            yield Node("Depend", (item, *self.awaited(proto.input[1])), (name,), (self.types[item],))
            self.types[name] = self.types[item]
        self.tuples[proto.output[0]] = tuple(items)

    def awaited(self, name: Name) -> tuple[Input, ...]:
        """What waits for a tuple waits for all of its items, of which one of each operator will do: as one tuple, for
        MindSpore drops what further inputs are."""
        items = tuple({self.made_by.get(item, item): item for item in reversed(self.items(name))}.values())[::-1]
        return (items,) if len(items) > 1 and all(self.types.get(item) for item in items) else items

    def operator(self, proto: mind_ir.NodeProto, kind: str, attributes: dict[str, Any]) -> Node:
        name = proto.output[0]
        shape = next((a for a in proto.attribute if a.name == SHAPE), None)
        is_tuple = shape is not None and shape.type in (Proto.TUPLE, Proto.LIST)
        types: tuple[TensorType | None, ...] = (None,)
        if shape is not None and is_tuple:
            types = tuple(_type(v.tensors[0]) if v.type == Proto.TENSORS else None for v in shape.values)
        elif shape is not None and shape.type == Proto.TENSORS:
            types = (_type(shape.tensors[0]),)
        if is_tuple and not any(types):  # numbers, a shape say: passed on as one value
            is_tuple, types = False, (None,)
        outputs = tuple(f"{name}#{i}" for i in range(len(types))) if is_tuple else (name,)
        if is_tuple:
            self.tuples[name] = outputs
            self.made_by |= dict.fromkeys(outputs, name)
        self.types.update(zip(outputs, types, strict=True))
        inputs: tuple[Input, ...] = tuple(self.given(each) for each in proto.input)
        if kind in ORDERING:
            inputs = tuple(item for each in proto.input for item in self.awaited(each))
        path = attributes.get("path", "")
        numbers = {each.name: each.s for each in proto.primal_attr}
        if "unique_id" in numbers:
            self.forward.setdefault(numbers["unique_id"], outputs[0])
        forward = self.forward.get(numbers.get("forward_unique_id", b""), "")
        marks = {each.name: each.i for each in proto.node_attr}
        again = self.repeated.setdefault(marks["recompute_id"], outputs[0]) if "recompute_id" in marks else ""
        again = again if "duplicated" in marks else ""
        return Node(kind, inputs, outputs, types, attributes, path, None, proto, forward=forward, again=again)

    @property
    def types(self) -> dict[Name, TensorType | None]:
        if not hasattr(self, "_types"):
            self._types: dict[Name, TensorType | None] = {p.name: _type(p) for p in self.model.graph.parameter}
            self._types |= {p.name: _type(p.tensor[0]) for p in self.model.graph.input}
        return self._types

    def constant(self, proto: mind_ir.NodeProto) -> Node:
        name, attribute = proto.output[0], proto.attribute[0]
        type = None
        if attribute.type == Proto.TENSORS:
            tensor = attribute.tensors[0]
            type = _type(tensor)
            value: Any = None
            if type.dtype != "bfloat16":
                value = np.frombuffer(tensor.raw_data, type.dtype).reshape(type.shape)
        else:
            value = _value(attribute)
        self.constants[name] = value
        self.types[name] = type
        return Node("Constant", (), (name,), (type,), value=value, origin=proto)


def _type(tensor: mind_ir.TensorProto) -> TensorType:
    if tensor.data_type not in DTYPES:
        raise UnreadableGraphError(f"{tensor.name or 'a tensor'} has the element type {tensor.data_type}")
    return TensorType(tuple(tensor.dims), DTYPES[tensor.data_type])


def _attributes(primitive: mind_ir.PrimitiveProto) -> Iterator[tuple[str, Any]]:
    for attribute in primitive.attribute:
        yield attribute.name, _value(attribute)


def _value(attribute: mind_ir.AttributeProto) -> Any:
    kind = attribute.type
    if kind in (Proto.TUPLE, Proto.LIST):
        return tuple(_value(each) for each in attribute.values)
    if kind == Proto.FLOAT:
        return attribute.floats[0] if attribute.floats else attribute.f
    if kind == Proto.DOUBLE:
        return attribute.doubles[0] if attribute.doubles else attribute.d
    if kind == Proto.STRING:
        return (attribute.strings[0] if attribute.strings else attribute.s).decode()
    if kind == Proto.BOOL:
        return bool(attribute.ints[0] if attribute.ints else attribute.i)
    if kind in (Proto.INT64, Proto.INT32, Proto.INT8, Proto.INT16, Proto.UINT8, Proto.UINT32, Proto.UINT64):
        return int(attribute.ints[0] if attribute.ints else attribute.i)
    return None


def write_rank(
    sharded: ShardedGraph, model: mind_ir.ModelProto, grid: DeviceGrid, rank: int
) -> tuple[mind_ir.ModelProto, dict[str, list[int]]]:
    """The MindIR of one rank, and the groups that it communicates over: name -> ranks."""
    writer = _Writer(sharded, model, grid, rank)
    return writer.write(), writer.groups


class _Writer:
    def __init__(self, sharded: ShardedGraph, model: mind_ir.ModelProto, grid: DeviceGrid, rank: int):
        self.sharded, self.grid, self.rank = sharded, grid, rank
        self.model = mind_ir.ModelProto()
        self.model.CopyFrom(model)
        self.graph = self.model.graph
        del self.graph.node[:]
        del self.graph.output[:]
        self.groups: dict[str, list[int]] = {}
        self.primitives: dict[tuple[str, tuple[tuple[str, Any], ...]], str] = {}
        self.types: dict[Name, TensorType] = {}
        self.written: dict[Name, Name] = {}
        """Item of an operator with several outputs -> what holds it."""
        self.items: dict[Name, tuple[Name, int, TensorType]] = {}
        """Those that nobody has used yet: their operator and place."""
        self.shared: dict[Any, Name] = {}
        """Tuples and constants, each of which is written once."""
        self._serial = 0
        self._outputs = model.graph.output

    def write(self) -> mind_ir.ModelProto:
        for parameter in self.graph.parameter:
            type = self.sharded.graph.parameters[parameter.name]
            self.types[parameter.name] = type
            del parameter.dims[:]
            parameter.dims.extend(type.shape)
        self.types |= self.sharded.graph.inputs
        for node in self.sharded.graph.nodes:
            self.types |= {n: type for n, type in zip(node.outputs, node.types, strict=True) if type is not None}
            self.write_node(node)
        self.write_outputs()
        return self.model

    def write_outputs(self) -> None:
        names = [self.name(each) for each in self.sharded.graph.outputs]
        name = names[0] if len(names) == 1 else self.make_tuple(self.sharded.graph.outputs)
        output = self.graph.output.add()
        output.CopyFrom(self._outputs[0])
        output.name = name

    def write_node(self, node: Node) -> None:
        if node.kind == "Constant":
            self.write_constant(node)
        elif node.kind == "SliceOfRank":
            self.slice(node)
        elif node.kind in ("AllReduce", "AllGather", "ReduceScatter", "AllToAll"):
            self.collective(node)
        elif node.origin is None:
            self.written_as(node, self.operator(node.kind, self.inputs(node), node.types[0], **node.attributes))
        else:
            self.copy(node)

    # What is given

    def name(self, value: Name) -> Name:
        if value in self.items:
            operator, position, type = self.items.pop(value)
            self.written[value] = self.operator("TupleGetItem", [operator, self.number(position)], type)
        return self.written.get(value, value)

    def inputs(self, node: Node) -> list[Name]:
        return [self.name(each) if isinstance(each, str) else self.make_tuple(each) for each in node.inputs]

    def make_tuple(self, items: Sequence[Name]) -> Name:
        """All outputs of an operator are what it gives."""
        key = tuple(items)
        if key not in self.shared:
            self.shared[key] = self.new_tuple(items)
        return self.shared[key]

    def new_tuple(self, items: Sequence[Name]) -> Name:
        node = self.add(self.primitive("MakeTuple"), [self.name(item) for item in items], "tuple")
        shape = node.attribute.add(name=SHAPE, type=Proto.TUPLE)
        for item in items:
            self.put_type(shape.values.add(type=Proto.TENSORS), self.types[item])
        return node.output[0]

    # What is written

    def fresh(self, hint: str) -> Name:
        self._serial += 1
        return f"sharded.{hint}.{self._serial}"

    def add(self, primitive: str, inputs: Sequence[Name], hint: str) -> mind_ir.NodeProto:
        name = self.fresh(hint)
        node = self.graph.node.add(name=name, op_type=f"REF::{primitive}", domain=f"Default/sharded/{hint}")
        node.output.append(name)
        node.input.extend(inputs)
        return node

    @staticmethod
    def put_type(attribute: mind_ir.AttributeProto, type: TensorType) -> None:
        tensor = attribute.tensors.add(data_type=CODES[type.dtype])
        tensor.dims.extend(type.shape)

    def operator(self, kind: str, inputs: Sequence[Name], type: TensorType | None, **attributes: Any) -> Name:
        node = self.add(self.primitive(kind, **attributes), inputs, kind)
        assert type is not None
        self.put_type(node.attribute.add(name=SHAPE, type=Proto.TENSORS), type)
        return node.output[0]

    def primitive(self, kind: str, **attributes: Any) -> str:
        key = kind, tuple(sorted(attributes.items()))
        if key not in self.primitives:
            name = f"{kind}:sharded{len(self.primitives)}"
            primitive = self.model.primitives.add(name=name, op_type=kind)
            for attribute, value in attributes.items():
                if isinstance(value, bool):
                    primitive.attribute.add(name=attribute, type=Proto.BOOL, i=int(value))
                elif isinstance(value, str):
                    primitive.attribute.add(name=attribute, type=Proto.STRING, s=value.encode())
                else:
                    primitive.attribute.add(name=attribute, type=Proto.INT64, i=value)
            self.primitives[key] = name
        return self.primitives[key]

    def changed(self, node: Node) -> str:
        """A primitive like that of the node's origin, but for its changes."""
        origin = node.origin.op_type.removeprefix("REF::")
        key = origin, tuple(sorted(node.changes.items()))
        if key not in self.primitives:
            primitive = self.model.primitives.add()
            primitive.CopyFrom(next(p for p in self.model.primitives if p.name == origin))
            self.primitives[key] = primitive.name = f"{origin}:sharded{len(self.primitives)}"
            for attribute in primitive.attribute:
                if attribute.name in node.changes and attribute.ints:
                    attribute.ints[0] = node.changes[attribute.name]
                elif attribute.name in node.changes:
                    attribute.i = node.changes[attribute.name]
        return self.primitives[key]

    def written_as(self, node: Node, name: Name) -> None:
        self.written[node.outputs[0]] = name

    def copy(self, node: Node) -> None:
        """As it was, with a rank's own inputs and shapes."""
        inputs = self.inputs(node)  # may write tuples, which come first
        written = self.graph.node.add()
        written.CopyFrom(node.origin)
        if node.changes:
            written.op_type = f"REF::{self.changed(node)}"
        del written.input[:]
        written.input.extend(inputs)
        name = node.outputs[0].rpartition("#")[0] if "#" in node.outputs[0] else node.outputs[0]
        written.name = written.output[0] = name
        for attribute in written.attribute:
            if attribute.name != SHAPE or not any(node.types):
                continue
            is_tuple = attribute.type in (Proto.TUPLE, Proto.LIST)
            for proto, type in zip(attribute.values if is_tuple else [attribute], node.types, strict=True):
                if type is not None:
                    del proto.tensors[0].dims[:]
                    proto.tensors[0].dims.extend(type.shape)
            if is_tuple:
                self.take_items(node, name)

    def take_items(self, node: Node, name: Name) -> None:
        """The items of an operator with several outputs."""
        if all(node.types):
            self.shared[node.outputs] = name
        for position, (item, type) in enumerate(zip(node.outputs, node.types, strict=True)):
            if type is not None:
                self.items[item] = name, position, type

    def write_constant(self, node: Node) -> None:
        if node.origin is not None:
            self.graph.node.add().CopyFrom(node.origin)
        elif isinstance(node.value, RankOffset):
            offset, type = self.grid.index(self.rank, node.value.axes) * node.value.stride, node.types[0]
            self.written_as(node, self.number(offset) if type is None else self.tensor(offset, type))
        elif isinstance(node.value, IsFirst) and node.types[0] is not None:
            self.written_as(node, self.tensor(float(not self.grid.index(self.rank, node.value.axes)), node.types[0]))
        elif isinstance(node.value, tuple):
            self.written_as(node, self.numbers(node.value))
        elif node.types[0] is not None:
            self.written_as(node, self.tensor(node.value, node.types[0]))
        elif isinstance(node.value, bool):
            self.written_as(node, self.truth(node.value))
        else:
            self.written_as(node, self.number(node.value))

    def truth(self, value: bool) -> Name:
        name, attribute = self._constant(Proto.BOOL)
        attribute.i = int(value)
        return name

    def _constant(self, kind: int) -> tuple[Name, mind_ir.AttributeProto]:
        name = self.fresh("constant")
        node = self.graph.node.add(name=name, op_type="Constant")
        node.output.append(name)
        return name, node.attribute.add(name="value", type=kind)

    def number(self, value: int) -> Name:
        if ("number", value) not in self.shared:
            self.shared["number", value], attribute = self._constant(Proto.INT64)
            attribute.i = value
        return self.shared["number", value]

    def numbers(self, values: Sequence[int]) -> Name:
        key = ("numbers", *map(int, values))
        if key not in self.shared:
            self.shared[key], attribute = self._constant(Proto.TUPLE)
            for value in key[1:]:
                attribute.values.add(type=Proto.INT64).ints.append(value)
        return self.shared[key]

    def tensor(self, value: Any, type: TensorType) -> Name:
        name, attribute = self._constant(Proto.TENSORS)
        self.put_type(attribute, type)
        attribute.tensors[0].raw_data = np.full(type.shape, value, type.dtype).tobytes()
        return name

    # Between ranks

    def slice(self, node: Node) -> None:
        (type,), dim = node.types, node.attributes["dim"]
        assert type is not None and isinstance(node.inputs[0], str)
        begin = [0] * len(type.shape)
        begin[dim] = self.grid.index(self.rank, node.attributes["axes"]) * type.shape[dim]
        inputs = [self.name(node.inputs[0]), self.numbers(begin), self.numbers(type.shape)]
        self.written_as(node, self.operator("Slice", inputs, type))

    def collective(self, node: Node) -> None:
        (type,), axes = node.types, node.attributes["axes"]
        assert type is not None and isinstance(node.inputs[0], str)
        given, before = self.name(node.inputs[0]), self.types[node.inputs[0]]
        ranks = self.grid.group(self.rank, axes)
        group = "group_" + "_".join(map(str, ranks))
        self.groups[group] = ranks
        if node.kind == "AllReduce":
            name = self.operator("AllReduce", [given], type, group=group, op=node.attributes["op"])
        elif node.kind == "AllToAll":
            name = self.operator(
                "AlltoAll",
                [given],
                type,
                group=group,
                split_count=len(ranks),
                split_dim=node.attributes["to_dim"],
                concat_dim=node.attributes["dim"],
            )
        else:
            name = self.along_first_dim(node, given, before, type, group, len(ranks))
        self.written_as(node, name)

    def along_first_dim(
        self, node: Node, given: Name, before: TensorType, after: TensorType, group: str, count: int
    ) -> Name:
        """AllGather and ReduceScatter work along dim 0: another dim is brought there, and back."""
        dim, attributes = node.attributes["dim"], {"group": group, "rank_size": count}
        if node.kind == "ReduceScatter":
            attributes["op"] = node.attributes["op"]
        if dim == 0:
            return self.operator(node.kind, [given], after, **attributes)
        order = [dim, *(i for i in range(len(after.shape)) if i != dim)]
        turned = self.operator("Transpose", [given, self.numbers(order)], _permuted(before, order))
        done = self.operator(node.kind, [turned], _permuted(after, order), **attributes)
        back = [int(i) for i in np.argsort(order)]
        return self.operator("Transpose", [done, self.numbers(back)], after)


def _permuted(type: TensorType, order: Sequence[int]) -> TensorType:
    return TensorType(tuple(type.shape[i] for i in order), type.dtype)
