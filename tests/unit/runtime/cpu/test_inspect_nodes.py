# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a graph are inspected."""

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.find_nan import FROM_OTHERS, inspect_nodes


def graph_of(*nodes):
    """A graph with a parameter `w`. Nodes: (kind, inputs, whether it has effects on memory); each is named after its kind."""
    model = mind_ir.ModelProto()
    model.graph.parameter.add(name="w")
    for kind, inputs, has_effects in nodes:
        primitive = model.primitives.add(name=kind, op_type=kind)
        if has_effects:
            primitive.attribute.add(name="side_effect_mem", type=mind_ir.AttributeProto.BOOL, i=1)
        node = model.graph.node.add(op_type=f"REF::{kind}", input=inputs, output=[kind], name=kind)
        shape = node.attribute.add(name="shape", type=mind_ir.AttributeProto.TENSORS)
        shape.tensors.add(dims=[2, 3], data_type=mind_ir.TensorProto.FLOAT)
    return model


def inspected(model, messages=()):
    found = {}
    inspect_nodes(model, messages, lambda node, what: found.setdefault(node, what) and None)
    return found


def test_users_of_a_node_wait_for_its_inspection():
    model = graph_of(("MatMul", ["x", "y"], False), ("Relu", ["MatMul"], False))
    assert inspected(model) == {"MatMul": "MatMul of the training step", "Relu": "Relu of the training step"}
    assert [(node.name, *node.input) for node in model.graph.node] == [
        ("MatMul", "x", "y"),
        ("MatMul.look", "MatMul"),
        ("Relu", "MatMul.look"),
        ("Relu.look", "Relu"),
    ]


def test_results_of_updates_are_not_inspected_because_kernels_do_not_write_them():
    model = graph_of(("AdamWeightDecay", ["w", "x"], True), ("TupleGetItem", ["AdamWeightDecay", "0"], False))
    assert inspected(model) == {}


def test_operators_that_only_read_a_parameter_are_inspected():
    assert list(inspected(graph_of(("Square", ["w"], False)))) == ["Square"]


def test_messages_are_told_from_operators():
    assert inspected(graph_of(("Custom", ["x"], False)), {"Custom"}) == {"Custom": FROM_OTHERS}
