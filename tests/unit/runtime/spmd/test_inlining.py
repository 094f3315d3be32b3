# SPDX-License-Identifier: Apache-2.0
"""Calls are written out: closures vanish, and what an item of a tuple waits for stands beside it."""

import pytest

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.spmd.inlining import BranchError, InliningError, inline_functions

KINDS = ("Mul", "Depend", "MakeTuple", "TupleGetItem", "Partial", "AddN", "AssignAdd", "Switch", "UpdateState")


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


CHOICE = (
    ["t = Partial taken x", "o = Partial other x", "which = Switch x t o", "chosen = which", "total = Mul chosen x"],
    "total",
)
TAKEN, OTHER = (("a",), ["p = Mul a a"], "p"), (("b",), ["q = AddN b"], "q")


def choosing(taken=TAKEN, other=OTHER, lengths=(2, 2), **more):
    model = model_of(CHOICE, taken=taken, other=other, **more)
    next(p for p in model.primitives if p.name == "AssignAdd").attribute.add(
        name="side_effect_mem", type=mind_ir.AttributeProto.BOOL, i=1
    )
    for graph, length in zip((model.graph, *model.functions), (2, *lengths, 2, 2), strict=False):
        for node in graph.node:
            shape = node.attribute.add(name="shape", type=mind_ir.AttributeProto.TENSORS)
            shape.tensors.add(dims=[length], data_type=1)
    return model


def test_of_two_functions_both_are_computed_and_one_result_is_selected():
    model = choosing()
    inline_functions(model)
    nodes = written_out(model)
    kinds = {p.name: p.op_type for p in model.primitives}
    (select,) = (inputs for kind, *inputs in nodes.values() if kinds.get(kind) == "Select")
    condition, first, second = select
    assert condition == "x" and nodes[first] == ("Mul", "x", "x") and nodes[second] == ("AddN", "x")
    assert not {"Switch", "Partial"} & set(kinds.values())


def test_functions_that_two_functions_give_are_chosen_between_too():
    """As the backward functions of both ways are."""
    give = lambda back: (("a",), [f"f = Partial {back} a"], "f")  # noqa: E731
    backs = {"back": (("c",), ["p = Mul c c"], "p"), "forth": (("c",), ["q = AddN c"], "q")}
    main = [*CHOICE[0][:-1], "later = chosen", "total = Mul later x"]
    model = model_of((main, "total"), taken=give("back"), other=give("forth"), **backs)
    for graph in (model.graph, *model.functions):
        for node in graph.node:
            node.attribute.add(name="shape", type=mind_ir.AttributeProto.TENSORS).tensors.add(dims=[2], data_type=1)
    inline_functions(model)
    assert sorted(kind for kind, *_ in written_out(model).values()) == ["AddN", "Mul", "Mul", "Select:of two branches"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"taken": (("a",), ["p = AssignAdd a a"], "p")}, "one of its ways writes something (AssignAdd)"),
        ({"lengths": (2, 3)}, "its ways give different shapes or types"),
        ({"other": (("b",), ["q = MakeTuple b b"], "q")}, "its ways give different things"),
        (
            {"other": (("b",), ["r = Partial other b", "s = Switch b r r", "q = s"], "q")},
            "it loops as long as a value says",
        ),
    ],
)
def test_ways_that_cannot_both_be_computed_are_refused(given, why):
    with pytest.raises(BranchError) as refused:
        inline_functions(choosing(**given))
    assert str(refused.value) == why


def test_what_waits_for_a_function_waits_for_all_that_it_holds():
    """One after the other: of several in one node MindSpore would drop some."""
    main = ["y = forward x sum", "both = MakeTuple sum y", "late = UpdateState x both", "total = Depend x late"]
    model = model_of((main, "total"), forward=FORWARD, backward=BACKWARD)
    inline_functions(model)
    assert all(len(inputs) == 2 for kind, *inputs in written_out(model).values() if kind == "UpdateState")
