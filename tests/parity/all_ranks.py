# SPDX-License-Identifier: Apache-2.0
"""The graphs of all ranks as one graph of one process: collectives become operators on what the ranks of a group hold.

So one compilation runs every rank, without processes or messages. What the partitioner writes is taken as it is.
"""

import functools
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.mindir import Proto, read_graph
from sporeloom.partition.propagate import shard_graph
from sporeloom.partition.rank_mindir import write_rank
from sporeloom.runtime.spmd.collectives import attributes, names_group
from sporeloom.runtime.spmd.shard import GridLayout

BY_TWOS = {"sum": "Add", "max": "Maximum", "min": "Minimum", "prod": "Mul"}
SHAPE = "shape"


class Merged:
    """Of the graphs of ranks 0, 1, ..., which hold the same nodes but for constants."""

    def __init__(self, models, groups):
        self.models, self.groups, self.serial = models, groups, 0
        self.model = mind_ir.ModelProto()
        self.model.CopyFrom(models[0])
        for repeated in (
            self.model.graph.node,
            self.model.graph.output,
            self.model.graph.parameter,
            self.model.primitives,
        ):
            del repeated[:]
        self.inputs = {each.name for each in models[0].graph.input}
        self.shapes, self.plain, self.renamed = {}, {}, {}

    def write(self):
        collectives = [self.add_primitives(rank, model) for rank, model in enumerate(self.models)]
        for rank, model in enumerate(self.models):
            for parameter in model.graph.parameter:
                own = self.model.graph.parameter.add()
                own.CopyFrom(parameter)
                own.name = self.name(rank, parameter.name)
                self.shapes[own.name] = own
        for each in self.model.graph.input:
            self.shapes[each.name] = each.tensor[0]
        for rank, model in enumerate(self.models):  # each of which a rank writes once, so these are not the same
            for node in model.graph.node:
                if node.op_type == "Constant":
                    self.copy(rank, node)
        others = ([n for n in model.graph.node if n.op_type != "Constant"] for model in self.models)
        for nodes in zip(*others, strict=True):
            values = [
                found.get(node.op_type.removeprefix("REF::")) for found, node in zip(collectives, nodes, strict=True)
            ]
            for rank, (node, value) in enumerate(zip(nodes, values, strict=True)):
                if value is None:
                    self.copy(rank, node)
                else:
                    self.communicate(rank, node, nodes, *value)
        names = [name for rank, model in enumerate(self.models) for name in self.output_names(rank, model)]
        output = self.model.graph.output.add()
        output.CopyFrom(self.models[0].graph.output[0])
        output.name = self.tuple_of(names)
        return self.model

    def name(self, rank, name):
        """Of what a rank holds by this name."""
        own = name if name in self.inputs else f"{name}@{rank}"
        return self.renamed.get(own, own)

    def output_names(self, rank, model):
        """Of the tensors in a rank's tuple."""
        (node,) = [n for n in model.graph.node if n.output[0] == model.graph.output[0].name]
        return [self.name(rank, each) for each in node.input]

    def add_primitives(self, rank, model):
        """Those of a rank; returns {name: kind, attributes} of its collectives."""
        found = {}
        for primitive in model.primitives:
            if any(names_group(a) for a in primitive.attribute):
                found[primitive.name] = primitive.op_type, attributes(primitive)
            else:
                own = self.model.primitives.add()
                own.CopyFrom(primitive)
                own.name = f"{rank}:{primitive.name}"
        return found

    def copy(self, rank, node):
        own = self.model.graph.node.add()
        own.CopyFrom(node)
        for field in ("input", "output"):
            names = [self.name(rank, each) for each in getattr(node, field)]
            del getattr(own, field)[:]
            getattr(own, field).extend(names)
        own.name = own.output[0]
        if node.op_type.startswith("REF::"):
            own.op_type = f"REF::{rank}:{node.op_type.removeprefix('REF::')}"
        for attribute in own.attribute:
            if attribute.name == SHAPE and attribute.type == Proto.TENSORS:
                self.shapes[own.output[0]] = attribute.tensors[0]

    # What collectives become

    def communicate(self, rank, node, nodes, kind, values):
        members = self.groups[rank][values["group"]]
        held = [self.name(other, nodes[other].input[0]) for other in members]
        place, count = members.index(rank), len(members)
        if kind in ("AllReduce", "ReduceScatter"):
            total = functools.reduce(lambda a, b: self.put(BY_TWOS[values["op"]], [a, b], self.dims(a)), held)
            result = total if kind == "AllReduce" else self.part(total, 0, place, count)
        elif kind == "AllGather":
            result = self.joined(held, 0)
        else:
            assert kind == "AlltoAll", kind
            parts = [self.part(each, values["split_dim"], place, count) for each in held]
            result = self.joined(parts, values["concat_dim"])
        self.renamed[self.name(rank, node.output[0])] = result

    def dims(self, name):
        return tuple(self.shapes[name].dims)

    def part(self, name, dim, place, count):
        dims = list(self.dims(name))
        dims[dim] //= count
        begin = [place * size if i == dim else 0 for i, size in enumerate(dims)]
        return self.put("Slice", [name, self.numbers(begin), self.numbers(dims)], dims)

    def joined(self, names, dim):
        if len(names) == 1:
            return names[0]
        dims = list(self.dims(names[0]))
        dims[dim] = sum(self.dims(each)[dim] for each in names)
        return self.put("Concat", [self.tuple_of(names), self.number(dim)], dims, like=names[0])

    def put(self, kind, inputs, dims, name=None, like=None):
        node = self.node(self.primitive(kind), inputs, name)
        tensor = node.attribute.add(name=SHAPE, type=Proto.TENSORS).tensors.add(
            data_type=self.shapes[like or inputs[0]].data_type
        )
        tensor.dims.extend(dims)
        self.shapes[node.output[0]] = tensor
        return node.output[0]

    def tuple_of(self, names):
        node = self.node(self.primitive("MakeTuple"), names)
        shape = node.attribute.add(name=SHAPE, type=Proto.TUPLE)
        for each in names:
            tensor = shape.values.add(type=Proto.TENSORS).tensors.add(data_type=self.shapes[each].data_type)
            tensor.dims.extend(self.dims(each))
        return node.output[0]

    def primitive(self, kind):
        if kind not in self.plain:
            self.plain[kind] = f"merged:{kind}"
            self.model.primitives.add(name=self.plain[kind], op_type=kind)
        return self.plain[kind]

    def node(self, primitive, inputs, name=None):
        self.serial += 1
        name = name or f"merged.{self.serial}"
        node = self.model.graph.node.add(name=name, op_type=f"REF::{primitive}", domain="Default/merged")
        node.output.append(name)
        node.input.extend(inputs)
        return node

    def constant(self, kind):
        self.serial += 1
        name = f"merged.{self.serial}"
        node = self.model.graph.node.add(name=name, op_type="Constant")
        node.output.append(name)
        return name, node.attribute.add(name="value", type=kind)

    def number(self, value):
        name, attribute = self.constant(Proto.INT64)
        attribute.i = value
        return name

    def numbers(self, values):
        name, attribute = self.constant(Proto.TUPLE)
        for value in values:
            attribute.values.add(type=Proto.INT64).ints.append(int(value))
        return name


def sharded_model(model, grid, parameters, inputs):
    """The graph of all ranks of a grid; and what `shard_graph` says of it.

    Args:
        parameters: name in the Cell -> dims.
        inputs: dims of each.
    """
    graph = read_graph(model)
    wanted = {full: parameters[name] for full in graph.parameters if (name := full.rpartition(":")[2]) in parameters}
    sharded = shard_graph(graph, grid, wanted, dict(zip(graph.inputs, inputs, strict=True)))
    written = [write_rank(sharded, model, grid, rank) for rank in range(grid.size)]
    return Merged([each for each, *_ in written], [groups for _, groups, _ in written]).write(), sharded


def part_of(parameters, name, num_dims, grid):
    """(shape, rank) -> NumPy's index of the part of a parameter that a rank holds."""
    layout = GridLayout(ValueLayout(parameters.get(name, ((),) * num_dims)), grid, ())
    return lambda shape, rank: layout.operator_slice(shape, rank).slices


def run(model, grid, parameters, values, inputs, folder, updated=False):
    """What every rank's outputs are: a list of arrays each; with `updated` its parameters afterwards, too, by name.

    Args:
        values: name in the Cell -> the whole value of a parameter.
    """

    def part(full):
        name, _, rank = full.rpartition("@")
        whole = values[name]
        return whole[part_of(parameters, name, whole.ndim, grid)(whole.shape, int(rank))]

    found, after = _computed(model, part, inputs, folder)
    per_rank = len(found) // grid.size
    of_ranks = [found[rank * per_rank :][:per_rank] for rank in range(grid.size)]
    if not updated:
        return of_ranks
    held = [{n.rpartition("@")[0]: v for n, v in after.items() if n.endswith(f"@{r}")} for r in range(grid.size)]
    return list(zip(of_ranks, held, strict=True))


def run_whole(model, values, inputs, folder, updated=False):
    """The outputs of one device's graph; with `updated` its parameters afterwards, too."""
    found, after = _computed(model, values.__getitem__, inputs, folder)
    return (found, after) if updated else found


def _computed(model, value_of, inputs, folder):
    path = Path(folder) / "graph.mindir"
    path.write_bytes(model.SerializeToString())
    cell = nn.GraphCell(ms.load(str(path)))
    for held in cell.get_parameters():
        held.set_data(Tensor(value_of(held.name.rpartition(":")[2]).copy()), slice_shape=True)
    found = [each.asnumpy() for each in cell(*map(Tensor, inputs))]
    return found, {p.name.rpartition(":")[2]: p.asnumpy() for p in cell.get_parameters()}


def drawn(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
