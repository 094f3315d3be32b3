# SPDX-License-Identifier: Apache-2.0
"""What is found in a partitioned graph that does not compute what one device does."""

import types
import unittest.mock

import numpy as np
import pytest
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.by_mindspore import devices as native
from sporeloom.runtime.by_mindspore.graph_checks import check_graph
from sporeloom.strategy.loader import strategy_of

GROUPS = {"everyone": [0, 1, 2, 3]}
NETWORK = "Default/network-ShardBatch/network-Net/"


def model_of(lines, dims=(4,), **attributes):
    """`name = Kind input ...`; a number, or numbers in brackets, is a constant."""
    model, known = mind_ir.ModelProto(), set()
    for line in lines:
        name, _, right = line.partition(" = ")
        kind, *given = right.split()
        if kind == "AllReduce" and kind not in known:
            primitive = model.primitives.add(name=kind, op_type=kind)
            primitive.attribute.add(name="group", type=mind_ir.AttributeProto.STRING, s=b"everyone")
        elif kind not in known:
            model.primitives.add(name=kind, op_type=kind)
        known.add(kind)
        inputs = [constant(model, each) if each[0] in "-0123456789[" else each for each in given]
        node = model.graph.node.add(name=name, output=[name], input=inputs, op_type=f"REF::{kind}")
        node.domain = f"{NETWORK}{name}"
        shape = node.attribute.add(name="shape", type=mind_ir.AttributeProto.TENSORS)
        shape.tensors.add(dims=dims)
    for kind, (name, value) in attributes.items():
        primitive = next(p for p in model.primitives if p.op_type == kind)
        primitive.attribute.add(name=name, type=mind_ir.AttributeProto.INT64, i=value)
    return model


def constant(model, text):
    name = f"constant {len(model.graph.node)}"
    node = model.graph.node.add(name=name, output=[name], op_type="Constant")
    value = node.attribute.add(name="value", type=mind_ir.AttributeProto.INT64)
    if "." in text or "[" in text:
        numbers = np.array(text.strip("[]").split(","), np.float32)
        value.type = mind_ir.AttributeProto.TENSORS
        value.tensors.add(data_type=mind_ir.TensorProto.FLOAT, dims=numbers.shape, raw_data=numbers.tobytes())
    else:
        value.i = int(text)
    return name


def said(model, strategies=None, cell=None):
    try:
        check_graph(model, strategies or {}, GROUPS, cell or nn.ReLU(), "strategy.yaml")
    except ConfigError as error:
        return str(error)
    return ""


ADDED = ["both = MakeTuple x z", "sum = AddN both"]
REDUCED = [*ADDED, "all = AllReduce sum"]


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([*REDUCED, "out = Mul all y"], True),
        ([*REDUCED, "out = Mul y all"], True),
        ([*REDUCED, "out = Mul all 0.25"], False),  # 1 / ranks: what MindSpore's pass is for
        ([*REDUCED, "out = Mul all [0.25,0.25,0.25]"], False),
        ([*REDUCED, "out = Mul all [0.25,0.5,0.25]"], True),
        ([*REDUCED, "out = Mul all 0.5"], True),
        ([*REDUCED, "out = Mul all 2"], True),
        ([*REDUCED, "out = Add all y"], False),
        ([*REDUCED, "half = Cast all", "out = Mul half y"], True),
        ([*REDUCED, "flat = Reshape all", "late = Depend flat", "out = Mul y late"], True),
        ([*ADDED, "flat = Reshape sum", "all = AllReduce flat", "out = Mul all y"], True),
        (["both = MakeTuple x z w", "sum = AddN both", "all = AllReduce sum", "out = Mul all y"], True),
        (["sum = Add x z", "all = AllReduce sum", "out = Mul all y"], False),
        (["all = AllReduce x", "product = Mul all y", "both = MakeTuple product z", "sum = AddN both"], False),
        ([*ADDED, "product = MatMul sum w", "all = AllReduce product", "out = Mul all y"], False),
    ],
)
def test_a_sum_that_the_compiler_rewrote_is_seen(lines, wrong):
    assert ("MindSpore multiplies and adds up the other terms" in said(model_of(lines))) == wrong


@pytest.mark.parametrize(
    ("line", "parts", "wrong"),
    [
        ("a = Tanh x", [[2, 2]], False),
        ("a = MatMul x w", [[2, 1], [1, 1]], False),
        ("a = Argmax x 0 35", [[2, 1]], True),
        ("a = Argmax x 1 35", [[2, 1]], False),
        ("a = Argmax x -1 35", [[1, 2]], True),
        ("a = Argmax x axis", [[2, 1]], True),  # computed: not known
        ("a = ReduceStd x 0", [[2, 1], []], True),
        ("a = ReduceStd x 1", [[2, 1], []], False),
        ("a = CumulativeLogsumexp x [1.0]", [[2, 1], []], False),
        ("a = BatchNorm x g b m v", [[2, 1], [1], [1], [1], [1]], True),
        ("a = BatchNorm x g b m v 1", [[2, 1], [1], [1], [1], [1]], True),
        ("a = BatchNorm x g b m v 0", [[2, 1], [1], [1], [1], [1]], False),  # by statistics that it is given
        ("a = BatchNorm x g b m v 1", [[1, 1], [1], [1], [1], [1]], False),
        ("a = SparseSoftmaxCrossEntropyWithLogits x y", [[2, 1], [2]], True),
        ("a = MaxPool x", [[2, 1, 1, 1]], False),
        ("a = MaxPool x", [[1, 1, 2, 1]], True),
        ("a = Conv2DTranspose x w", [[2, 1, 1, 1], [2, 1, 1, 1]], True),
        ("a = UnsortedSegmentMax x s", [[2, 1], [2]], True),
        ("a = UnsortedSegmentMax x s", [[1, 2], [1]], False),
        ("a = TensorScatterAdd x i u", [[2, 1], [1, 1], [1, 1]], True),
        ("a = TensorScatterAdd x i u", [[1, 2], [1, 1], [1, 2]], False),
        ("a = TensorScatterAdd x i u", [[1, 2], [1, 1], [1]], True),  # places in both dims
        ("a = Concat x", [[[2, 1], [2, 1]]], False),
        ("a = OfTomorrow x", [[2, 1]], True),
        ("a = OfTomorrow x", [[1, 1], []], False),
    ],
)
def test_only_what_is_known_to_be_the_same_on_parts_is_sharded(line, parts, wrong):
    kind = line.split()[2]
    strategies = {f"{NETWORK}block-Block/{kind}-op0": parts}
    model = model_of([line])
    model.graph.node[-1].domain = next(iter(strategies))
    told = said(model, strategies)
    assert bool(told) == wrong
    if wrong:
        assert told.startswith(f"strategy.yaml: {kind} of block, forward is sharded into")
        assert f"self.NAME = ops.{kind}(...)" in told


@pytest.mark.parametrize(("item", "domain", "wrong"), [(0, "", True), (1, "", False), (0, "Gradients/", False)])
def test_the_place_of_a_maximum_counts_within_a_part_and_its_value_does_not(item, domain, wrong):
    model = model_of(["a = ArgMaxWithValue x 0", f"place = TupleGetItem a {item}"])
    strategies = {f"{NETWORK}ArgMaxWithValue-op0": [[2, 1]]}
    largest, used = (node for node in model.graph.node if node.op_type != "Constant")
    largest.domain, used.domain = next(iter(strategies)), f"{domain}{used.domain}"
    assert bool(said(model, strategies)) == wrong


def test_an_operator_with_a_rule_of_its_own_for_parts_is_the_user_s():
    strategies = {f"{NETWORK}TensorScatterElements-op0": [[2, 1], [2, 1], [2, 1]]}
    model = model_of(["a = TensorScatterElements x i u"], TensorScatterElements=("self_define_shard", 1))
    model.graph.node[-1].domain = next(iter(strategies))
    assert not said(model, strategies)


def test_what_another_stage_has_is_its_business_and_another_number_is_the_same_operator():
    strategies = {f"{NETWORK}layer-Layer/Argmax-op0": [[2, 1]]}
    assert not said(model_of(["a = Tanh x"]), strategies)
    for domain in (f"recompute_{NETWORK}layer-Layer/Argmax-op0", f"{NETWORK}layer-Layer/Argmax-op7"):
        model = model_of(["a = Argmax x 0"])
        model.graph.node[-1].domain = domain
        assert "Argmax of layer, forward is sharded" in said(model, strategies)


def test_a_shape_that_depends_on_the_data_is_refused():
    assert "a tensor whose shape depends on the data" in said(model_of(["a = NonZero x"], dims=(-1, 2)))


def test_the_graph_of_a_device_is_looked_at_and_every_rank_told():
    """Without a device: MindSpore's executor gives the graph by the same call."""
    model = model_of([*REDUCED, "out = Mul all y"])
    executor = types.SimpleNamespace(
        get_func_graph_proto=lambda phase, kind, incremental: model.SerializeToString(), get_strategy=lambda phase: {}
    )
    cell = nn.ReLU()
    cell.compile, cell.current_phase = lambda *_: None, "train"
    device = native.Devices(strategy_of({"mesh": {"dp": 4}}), 2)
    told = []
    device.max_over_ranks = lambda value: max(value, 3)  # rank 1 has found something, too
    device.broadcast_value = lambda value, source: told.append((value, source)) or ["what rank 1 found"]
    with (
        unittest.mock.patch.object(native, "get_process_group_ranks", GROUPS.get),
        unittest.mock.patch.object(native.cell_graph_executor, "_graph_executor", executor),
        pytest.raises(ConfigError, match="what rank 1 found"),
    ):
        device.look_at(cell, ())
    ((mine, source),) = told
    assert "MindSpore multiplies and adds up the other terms" in mine[0]
    assert source == 1
