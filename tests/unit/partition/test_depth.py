# SPDX-License-Identifier: Apache-2.0
"""The graph of a deep network from two with fewer layers: equal to the one that is written at full depth, or refused."""

import random

import numpy as np
import pytest

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.partition.depth.entries import read_entries
from sporeloom.partition.depth.units import IrregularDepthError, Units
from sporeloom.partition.depth.unroll import NUM_UNITS, unrolled
from sporeloom.partition.mindir import CODES, read_graph

LITERAL = Units(10**9, 1)
"""No layer number is replaced."""
FLOAT, INT = CODES["float32"], CODES["int32"]


class Network:
    """The graph of a forward and backward pass: layer i multiplies by its weight, and by a constant of its own."""

    def __init__(self, depth, wide=(), late=(), period=1):
        self.depth, self.wide, self.late, self.period = depth, wide, late, period
        self.model, self.ids = mind_ir.ModelProto(), 0
        self.graph = self.model.graph
        self.graph.name = f"graph{depth}"
        self.random = random.Random(depth)  # names and numbers of nodes differ between graphs
        self.build()

    def name(self, stem):
        self.ids += 1
        return f"graph{self.depth}:{stem}_{self.random.randrange(10**6)}:{self.ids}"

    def constant(self, value):
        node = self.graph.node.add(op_type="Constant", name=f"value_{self.ids}_{self.depth}")
        self.ids += 1
        node.output.append(node.name)
        attribute = node.attribute.add(name="value")
        if isinstance(value, np.ndarray):
            attribute.type = mind_ir.AttributeProto.TENSORS
            attribute.tensors.add(name="value0", data_type=INT, dims=value.shape, raw_data=value.tobytes())
        else:
            attribute.type, attribute.i = mind_ir.AttributeProto.INT64, value
        return node.name

    def operator(self, kind, inputs, domain, path="", size=4, **ids):
        key = f"{kind}:{self.random.randrange(10**6)}_{self.ids}"
        primitive = self.model.primitives.add(name=key, op_type=kind)
        if path:
            primitive.attribute.add(name="path", s=path.encode(), type=mind_ir.AttributeProto.STRING)
        node = self.graph.node.add(op_type=f"REF::{key}", name=self.name(kind), domain=f"{domain}/{kind}-op{self.ids}")
        node.output.append(node.name)
        node.input.extend(inputs)
        attribute = node.attribute.add(name="shape", type=mind_ir.AttributeProto.TENSORS)
        attribute.tensors.add(data_type=FLOAT, dims=(size,))
        for name, value in ids.items():
            node.primal_attr.add(name=name, s=str(value).encode())
        return node.name

    def parameter(self, name):
        self.graph.parameter.add(name=f"graph{self.depth}:{name}", ref_key=name, dims=(4,), data_type=FLOAT)
        return f"graph{self.depth}:{name}"

    def build(self):
        weights = [self.parameter(f"layers.{i}.weight") for i in range(self.depth)]
        given = self.graph.input.add(name=f"graph{self.depth}:batch0")
        given.tensor.add(dims=(4,), data_type=FLOAT)
        values, numbers = [given.name], list(range(500, 500 + self.depth))
        self.random.shuffle(numbers)
        for i, weight in enumerate(weights):
            inputs = [values[-1], weight, self.constant(drawn(i))]
            if i in self.late:
                inputs.append(given.name)
            kind = "Mul" if i % self.period == 0 else "Add"
            size = 8 if i in self.wide else 4
            domain = f"Default/layers-CellList/{i}-Block"
            values.append(
                self.operator(
                    kind, inputs, domain, f"layers.{i}.product", size, unique_id=numbers[i], forward_node_name=i
                )
            )
        loss = self.operator("ReduceSum", [values[-1]], "Default")
        slope, slopes = loss, {}
        for i in reversed(range(self.depth)):
            at = f"Gradients/Default/layers-CellList/{i}-Block/Grad_Mul"
            slope = slopes[i] = self.operator("Mul", [slope, weights[i]], at, forward_unique_id=numbers[i])
        gradients = [
            self.operator("Mul", [slopes[i], values[i]], f"Gradients/Default/layers-CellList/{i}-Block/Grad_Mul")
            for i in range(self.depth)
        ]
        total = self.operator("AddN", [self.operator("MakeTuple", gradients, "Default")], "Default")
        waited = [*values[1:]]
        self.random.shuffle(waited)
        state = self.operator("UpdateState", [loss, self.operator("MakeTuple", waited, "Default")], "Default")
        result = self.operator("MakeTuple", [loss, total, *gradients], "Default")
        self.graph.output.add(name=self.operator("Depend", [result, state], "Default"))


def drawn(layer):
    return np.random.default_rng(layer).integers(0, 100, 5, dtype=np.int32)


def label_of(depth):
    known = {drawn(i).tobytes(): f"layers.{i}.drawn" for i in range(depth)}
    return lambda tensor: known.get(tensor.raw_data)


def derived(depth, units, build):
    counts = [units.num_layers(count) for count in NUM_UNITS]
    return unrolled(
        [build(count).model for count in counts],
        units,
        units.count(depth),
        [[""]] * 3,
        [label_of(count) for count in counts],
        lambda label: drawn(int(label.split(".")[1])).tobytes(),
    )


def plain(model):
    entries = read_entries(model, LITERAL, [""] * len(model.graph.input), lambda _: None)
    return [(entry.content, entry.inputs, entry.ids) for entry in entries]


@pytest.mark.parametrize(
    ("depth", "units", "settings"),
    [
        (12, Units(0, 1), {}),
        (40, Units(0, 1), {}),
        (7, Units(0, 1), {}),
        (20, Units(2, 1), {"wide": (0, 1), "late": (1,)}),
        (24, Units(0, 2), {"period": 2}),
        (25, Units(1, 3), {"period": 3, "wide": (0,)}),
    ],
)
def test_it_is_the_graph_at_full_depth(depth, units, settings):
    found, expected = derived(depth, units, lambda count: Network(count, **settings)), Network(depth, **settings).model
    assert plain(found) == plain(expected)
    names = [node.output[0] for node in found.graph.node]
    assert len({*names}) == len(names)
    kinds = [
        [(node.kind, node.types, node.scope and node.scope.cell) for node in read_graph(m).nodes]
        for m in (found, expected)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    "settings",
    [{"wide": (2,)}, {"late": (5,)}, {"period": 2}, {"wide": (3, 4)}],
    ids=["a layer differs", "a layer of the larger one reads the input", "another pattern", "two layers differ"],
)
def test_layers_that_are_not_equal_are_refused(settings):
    with pytest.raises(IrregularDepthError):
        derived(12, Units(0, 1), lambda count: Network(count, **settings))


def test_what_depends_on_the_depth_is_refused():
    def build(count):
        network = Network(count)
        network.graph.node[0].attribute[0].tensors[0].raw_data = drawn(1000 + count).tobytes()
        return network

    with pytest.raises(IrregularDepthError):
        derived(12, Units(0, 1), build)
