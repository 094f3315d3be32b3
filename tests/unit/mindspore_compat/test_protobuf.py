# SPDX-License-Identifier: Apache-2.0
"""MindIR by protobuf's compiled implementation, beside MindSpore's own by Python's."""

import sys

from mindspore.train import mind_ir_pb2

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.mindspore_compat.protobuf import CHOICE, compiled_messages


def some_graph(messages):
    model = messages.ModelProto(ir_version="1")
    model.graph.name = "graph"
    for i in range(3):
        node = model.graph.node.add(name=f"node{i}", op_type="MatMul", input=["a", "b"], output=[f"o{i}"])
        node.attribute.add(name="axis", type=messages.AttributeProto.INT64, ints=[i, -1])
    model.graph.parameter.add(name="weight", dims=[2, 3], data_type=messages.TensorProto.FLOAT)
    return model


def test_both_implementations_write_the_same_bytes_and_read_each_others():
    assert mind_ir is not mind_ir_pb2  # 100 times as fast, where protobuf has it
    ours, theirs = some_graph(mind_ir), some_graph(mind_ir_pb2)
    content = theirs.SerializeToString(deterministic=True)
    assert ours.SerializeToString(deterministic=True) == content
    read = mind_ir.ModelProto.FromString(content)
    assert [list(node.attribute[0].ints) for node in read.graph.node] == [[0, -1], [1, -1], [2, -1]]
    assert mind_ir_pb2.ModelProto.FromString(read.SerializeToString()) == theirs


def test_protobuf_is_as_it_was_afterwards(monkeypatch):
    monkeypatch.setenv(CHOICE, "python")
    before = dict(sys.modules)
    compiled_messages(mind_ir_pb2)
    assert {name: module for name, module in sys.modules.items() if name.startswith("google.")} == {
        name: module for name, module in before.items() if name.startswith("google.")
    }
    assert sys.modules["google"].protobuf is before["google.protobuf"]


def test_without_the_compiled_implementation_mindspores_own_is_taken(monkeypatch):
    monkeypatch.setitem(sys.modules, "google._upb", None)
    monkeypatch.setitem(sys.modules, "google._upb._message", None)
    assert compiled_messages(mind_ir_pb2) is mind_ir_pb2
