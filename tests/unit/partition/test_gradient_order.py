# SPDX-License-Identifier: Apache-2.0
from sporeloom.partition.gradient_order import gradients_when_due
from sporeloom.partition.graph import Graph, Node, TensorType

SQUARE = TensorType((4, 4), "float32")


def node(kind, output, *inputs, **attributes):
    return Node(kind, inputs, (output,), (SQUARE,), attributes)


def test_what_leads_to_one_gradient_follows_its_inputs():
    """Three layers, as MindSpore orders them: gradients of activations, then of weights, then what is done with these."""
    nodes = [node("Square", "dy", "y"), node("MatMul", "dx2", "dy", "w2")]
    nodes += [node("MatMul", "dx1", "dx2", "w1"), node("MatMul", "dx0", "dx1", "w0")]
    for i, given in ((0, "dx1"), (1, "dx2"), (2, "dy")):
        nodes.append(node("MatMul", f"dw{i}", given, f"h{i}"))
    nodes += [node("Cast", f"cast{i}", f"dw{i}") for i in range(3)]
    nodes += [node("ReduceScatter", f"g{i}", f"cast{i}") for i in range(3)]
    nodes.append(node("Sum", "of all", "g0", "g1"))
    inputs = dict.fromkeys(("y", "h0", "h1", "h2"), SQUARE)
    graph = Graph(dict.fromkeys(("w0", "w1", "w2"), SQUARE), inputs, nodes, ["dx0", "g0", "g1", "g2", "of all"])
    ordered = gradients_when_due(graph)
    assert sorted(map(id, ordered)) == sorted(map(id, nodes))
    names = [each.outputs[0] for each in ordered]
    known = {*graph.parameters, *inputs}
    for each in ordered:  # what it needs is there
        assert known.issuperset(each.flat_inputs())
        known |= set(each.outputs)
    # The third layer's gradient is wanted by nobody else: it is complete before the first one's activations are.
    assert names.index("g2") < names.index("dx0")
    # The others are wanted by the sum, too, so they stay behind what MindSpore puts in front of them.
    assert names.index("dx0") < names.index("dw0") < names.index("g0") < names.index("of all")


def test_an_operator_that_writes_a_parameter_keeps_its_place():
    written = node("Assign", "done", "w", "dy", side_effect_mem=True)
    nodes = [node("Square", "x", "dy"), node("Square", "y", "x"), written]
    graph = Graph({"w": SQUARE}, {"dy": SQUARE}, nodes, ["y", "done"])
    assert gradients_when_due(graph) == nodes
