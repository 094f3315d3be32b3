# SPDX-License-Identifier: Apache-2.0
"""Reads a single-device MindIR model as a graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.partition.graph import Graph, Input, Name, Node, Scope, TensorType

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
"""Operators that only order others."""


class UnreadableGraphError(ValueError):
    """The graph contains constructs that cannot be sharded."""


def read_graph(model: mind_ir.ModelProto) -> Graph:
    """Read the graph of one device.

    Raises:
        UnreadableGraphError: its control flow depends on values.
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
        """MindSpore's operator ids, which gradients refer to -> first output of the operator."""
        self.repeated: dict[int, Name] = {}
        """MindSpore's ids of recomputed operators -> first output of the original operator."""

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
        """Return a value, or all values of a (nested) tuple."""
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
        elif kind == "Depend" and not self.awaited(proto.input[1]):  # emitted by recomputation: it waits for nothing
            self.name_again(name, proto.input[0])
        elif kind == "TupleGetItem" and proto.input[0] in self.tuples:
            self.name_again(name, self.tuples[proto.input[0]][self.constants[proto.input[1]]])
        elif kind == "Depend" and proto.input[0] in self.tuples:
            yield from self.depending_items(proto)
        else:
            yield self.operator(proto, kind, self.attributes[key])

    def name_again(self, name: Name, item: Name) -> None:
        if item in self.tuples:
            self.tuples[name] = self.tuples[item]
        else:
            self.renamed[name] = self.renamed.get(item, item)

    def depending_items(self, proto: mind_ir.NodeProto) -> Iterator[Node]:
        """Replace a dependency of a tuple by one dependency for each of its items."""
        items = []
        for position, item in enumerate(self.items(proto.input[0])):
            name = f"{proto.output[0]}#{position}"
            items.append(name)
            inputs = (item, *self.awaited(proto.input[1]))
            yield Node("Depend", inputs, (name,), (self.types[item],), scope=self.scope(proto, name))
            self.types[name] = self.types[item]
        self.tuples[proto.output[0]] = tuple(items)

    def awaited(self, name: Name) -> tuple[Input, ...]:
        """Values to wait for in place of a tuple: one item of each operator, packed into one tuple because MindSpore
        ignores the type of further inputs."""
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
        if is_tuple and not any(types):  # numbers, such as a shape: one value
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
        scope = self.scope(proto, outputs[0], bool(attributes.get("is_backward")))
        return Node(kind, inputs, outputs, types, attributes, path, None, proto, scope=scope)

    def scope(self, proto: mind_ir.NodeProto, name: Name, is_backward: bool = False) -> Scope:
        """Derive the scope from the domain, `Default/NAME-CLASS/.../OPERATOR-op0`, and from MindSpore's operator ids.

        `is_backward`: a Cell's `bprop` has it, whose domain is like that of its `construct`.
        """
        numbers = {each.name: each.s for each in proto.primal_attr}
        if "unique_id" in numbers:
            self.forward.setdefault(numbers["unique_id"], name)
        forward = self.forward.get(numbers.get("forward_unique_id", b""), "")
        marks = {each.name: each.i for each in proto.node_attr}
        first = self.repeated.setdefault(marks["recompute_id"], name) if "recompute_id" in marks else ""
        again = first if "duplicated" in marks else ""
        place, *names = proto.domain.split("/")
        cell = "" if place == "Gradients" else ".".join(each.rpartition("-")[0] for each in names[:-1])
        return Scope(cell, is_backward or place == "Gradients" or "duplicated" in marks, name, forward, again)

    @cached_property
    def types(self) -> dict[Name, TensorType | None]:
        found: dict[Name, TensorType | None] = {p.name: _type(p) for p in self.model.graph.parameter}
        return found | {p.name: _type(p.tensor[0]) for p in self.model.graph.input}

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
