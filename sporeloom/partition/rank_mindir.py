# SPDX-License-Identifier: Apache-2.0
"""Writes the sharded graph of one rank as MindIR."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.partition.graph import IsFirst, Name, Node, RankOffset, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.mindir import CODES, SHAPE, Proto
from sporeloom.partition.sharded_graph import ShardedGraph

MAX_NAME = 120
"""Maximum length of a group's name; the limit of HCCL is 127."""
OF_COLLECTIVES: dict[str, dict[str, Any]] = {
    "AllReduce": {"fusion": 0, "index": 0, "no_eliminate": True},
    "AllGather": {"fusion": 0, "mean_flag": False, "no_eliminate": True},
    "ReduceScatter": {"fusion": 0, "no_eliminate": True},
    "AlltoAll": {"no_eliminate": True},
}
"""Constant attributes of MindSpore's communication operators."""


def group_name(ranks: Sequence[int]) -> str:
    """The name of a communication group, equal on all its ranks."""
    name = "group_" + "_".join(map(str, ranks))
    if len(name) <= MAX_NAME:
        return name
    return f"group_of_{len(ranks)}_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def write_rank(
    sharded: ShardedGraph, model: mind_ir.ModelProto, grid: DeviceGrid, rank: int
) -> tuple[mind_ir.ModelProto, dict[str, list[int]], dict[Name, Name]]:
    """Write the MindIR of one rank. Returns it with its communication groups, name -> ranks, and the names of values that
    have others in it."""
    writer = _Writer(sharded, model, grid, rank)
    return writer.write(), writer.groups, writer.written


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
        """Item of an operator with several outputs -> name that it was written under."""
        self.items: dict[Name, tuple[Name, int, TensorType]] = {}
        """Items that have not been used yet -> operator, index and type."""
        self.shared: dict[Any, Name] = {}
        """Tuples and constants, each of which is written once."""
        self._serial = 0
        self._outputs = model.graph.output

    def write(self) -> mind_ir.ModelProto:
        self.types = {**self.sharded.graph.parameters, **self.sharded.graph.inputs}
        self.declare_parameters()
        self.declare_inputs()
        for node in self.sharded.graph.nodes:
            self.types |= {n: type for n, type in zip(node.outputs, node.types, strict=True) if type is not None}
            self.write_node(node)
        self.write_outputs()
        return self.model

    def declare_parameters(self) -> None:
        """Declare the parameters that the graph uses, in the order of the source."""
        source = [mind_ir.TensorProto.FromString(each.SerializeToString()) for each in self.graph.parameter]
        del self.graph.parameter[:]
        for parameter in source:
            if (type := self.sharded.graph.parameters.get(parameter.name)) is not None:
                del parameter.dims[:]
                parameter.dims.extend(type.shape)
                self.graph.parameter.append(parameter)

    def declare_inputs(self) -> None:
        """Declare inputs in the order of the sharded graph; the passes of a pipeline also receive values of other
        passes."""
        source = {each.name: mind_ir.ValueInfoProto.FromString(each.SerializeToString()) for each in self.graph.input}
        del self.graph.input[:]
        for name, type in self.sharded.graph.inputs.items():
            proto = self.graph.input.add()
            if name in source:
                proto.CopyFrom(source[name])
            else:
                proto.name = name
                proto.tensor.add(name=name)
            proto.tensor[0].data_type = CODES[type.dtype]
            del proto.tensor[0].dims[:]
            proto.tensor[0].dims.extend(type.shape)

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

    # Reading values

    def name(self, value: Name) -> Name:
        if value in self.items:
            operator, position, type = self.items.pop(value)
            self.written[value] = self.operator("TupleGetItem", [operator, self.number(position)], type)
        return self.written.get(value, value)

    def inputs(self, node: Node) -> list[Name]:
        return [self.name(each) if isinstance(each, str) else self.make_tuple(each) for each in node.inputs]

    def make_tuple(self, items: Sequence[Name]) -> Name:
        """Pack values; all outputs of an operator are already packed."""
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

    # Writing nodes

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
        """A copy of the primitive of the node's origin, with the node's changed attributes."""
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
        """Copy the origin of a node, with local inputs and shapes."""
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
        """Register the items of an operator with several outputs."""
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

    # Communication

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
        if stages := node.attributes.get("stages"):
            ranks = [ranks[stage] for stage in stages]
        group = group_name(ranks)
        self.groups[group] = ranks
        if node.kind == "AllReduce":
            attributes = {"group": group, "op": node.attributes["op"], **OF_COLLECTIVES["AllReduce"]}
            name = self.operator("AllReduce", [given], type, **attributes)
        elif node.kind == "AllToAll":
            dims = {"split_dim": node.attributes["to_dim"], "concat_dim": node.attributes["dim"]}
            counts = {"split_count": len(ranks), "rank_size": len(ranks)}
            name = self.operator("AlltoAll", [given], type, group=group, **dims, **counts, **OF_COLLECTIVES["AlltoAll"])
        else:
            name = self.along_first_dim(node, given, before, type, group, len(ranks))
        self.written_as(node, name)

    def along_first_dim(
        self, node: Node, given: Name, before: TensorType, after: TensorType, group: str, count: int
    ) -> Name:
        """Emit an AllGather or ReduceScatter, which work along dim 0: another dim is transposed to the front and back."""
        dim, attributes = node.attributes["dim"], {"group": group, "rank_size": count, **OF_COLLECTIVES[node.kind]}
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
