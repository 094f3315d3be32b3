# SPDX-License-Identifier: Apache-2.0
"""Calls are written out: closures vanish, and what an item of a tuple waits for stands beside it."""

import pytest

from sporeloom.private_names import mind_ir
from sporeloom.runtime.cpu.inlining import InliningError, calls_of_functions, inline_functions

KINDS = ("Mul", "Depend", "MakeTuple", "TupleGetItem", "Partial", "AddN", "AssignAdd")


def graph_of(graph, inputs, lines, output):
    graph.input.extend(mind_ir.ValueInfoProto(name=name, tensor=[mind_ir.TensorProto()]) for name in inputs)
    for line in lines:
        name, _, right = line.partition(" = ")
        kind, *names = right.split()
        node = graph.node.add(name=name, output=[name], input=names, op_type=f"REF::{kind}")
        if kind == "Constant":
            node.op_type = "Constant"
            node.attribute.add(name="value", type=mind_ir.AttributeProto.INT64, i=int(names[0]))
            del node.input[:]
    graph.output.add(name=output)


def model_of(main, **functions):
    model = mind_ir.ModelProto()
    for kind in KINDS:
        model.primitives.add(name=kind, op_type=kind)
    graph_of(model.graph, ("x", "sum"), *main)
    for name, (inputs, lines, output) in functions.items():
        graph_of(model.functions.add(name=name), inputs, lines, output)
    return model


def written_out(model):
    return {node.output[0]: (node.op_type.removeprefix("REF::"), *node.input) for node in model.graph.node}


FORWARD = (("a", "into"), ["y = Mul a a", "back = Partial backward y into", "both = MakeTuple y back"], "both")
BACKWARD = (("y", "into", "dy"), ["added = AssignAdd into dy", "done = Depend y added", "all = MakeTuple done"], "all")
MAIN = (
    [
        *("zero = Constant 0", "one = Constant 1"),
        *("first = forward x sum", "y1 = TupleGetItem first zero", "b1 = TupleGetItem first one", "g1 = b1 y1"),
        *("second = forward y1 sum", "b2 = TupleGetItem second one", "late = Depend x second", "g2 = b2 late"),
        *("d1 = TupleGetItem g1 zero", "d2 = TupleGetItem g2 zero", "both = MakeTuple d1 d2", "total = AddN both"),
    ],
    "total",
)


def test_calls_become_nodes_and_what_is_waited_for_stays_in_sight():
    model = model_of(MAIN, forward=FORWARD, backward=BACKWARD)
    assert calls_of_functions(model) == {"forward": 2, "backward": 2}
    assert inline_functions(model) == 4
    nodes = written_out(model)
    assert not model.functions and not {"Partial", "TupleGetItem"} & {kind for kind, *_ in nodes.values()}
    kind, items = nodes["total"]
    assert kind == "AddN"
    _, *ends = nodes[items]
    # Behind a node that takes them out of a tuple the runtime would not see the additions that they wait for.
    assert [nodes[nodes[end][2]][0] for end in ends] == ["AssignAdd", "AssignAdd"]
    additions = [name for name, (kind, *_) in nodes.items() if kind == "AssignAdd"]
    assert len(additions) == 2 and nodes[additions[0]][1:] == ("sum", "y~1")
    assert nodes[nodes[additions[1]][2]][1:] == ("x", "y~3")  # late, after the second call


def test_what_cannot_be_written_out_is_refused():
    with pytest.raises(InliningError, match="gives a function"):
        inline_functions(model_of((["all = forward x sum"], "all"), forward=FORWARD, backward=BACKWARD))
    with pytest.raises(InliningError, match="takes 2 arguments, not 1"):
        inline_functions(model_of((["all = forward x"], "all"), forward=FORWARD, backward=BACKWARD))
    taken = ["all = forward x sum", "bad = Mul all x"]
    with pytest.raises(InliningError, match=r"Mul \(bad\) takes a function"):
        inline_functions(model_of((taken, "bad"), forward=FORWARD, backward=BACKWARD))
