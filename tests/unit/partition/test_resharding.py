# SPDX-License-Identifier: Apache-2.0
"""With `reshards` a parameter is gathered for the forward pass and anew for the backward pass, when it is needed."""

from dataclasses import replace

import numpy as np
import pytest

from sporeloom.partition.graph import OF_THIS_PASS, Graph, Node, Scope, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.parameter_values import of_parameters_alone
from sporeloom.partition.propagate import shard_graph
from sporeloom.partition.stages import cut_into_stages

GRID = DeviceGrid({"dp": 2})
BY_ROW = (("dp",), ())
SQUARE = TensorType((4, 4), "float32")


def chain(num_layers=3, half=False):
    """x W0 W1 .., and the gradient of x: each weight is used once forward and once backward."""
    graph = Graph({f"w{i}": SQUARE for i in range(num_layers)}, {"x": SQUARE}, [], [])
    graph.nodes += [Node("Constant", (), (name,), (None,), value=value) for name, value in (("t", True), ("f", False))]
    used, last = [], "x"
    for i in range(num_layers):
        name = f"w{i}"
        if half:
            graph.nodes.append(Node("Constant", (), (f"d{i}",), (None,), value=43))
            graph.nodes.append(
                Node("Cast", (name, f"d{i}"), (name := f"cast{i}",), (SQUARE,), scope=Scope(f"layers.{i}"))
            )
        used.append(name)
        scope = Scope(f"layers.{i}", False, f"h{i}")
        graph.nodes.append(Node("MatMul", (last, name, "f", "f"), (last := f"h{i}",), (SQUARE,), scope=scope))
    for i in reversed(range(num_layers)):
        scope = Scope("", True, f"g{i}", f"h{i}")
        graph.nodes.append(Node("MatMul", (last, used[i], "f", "t"), (last := f"g{i}",), (SQUARE,), scope=scope))
    graph.outputs.append(last)
    return graph


def gathers(sharded):
    """What each all-gather of a weight follows: the operator whose result it waits for, in the order of the graph."""
    makers = {name: node for node in sharded.graph.nodes for name in node.outputs}
    found = []
    for node in sharded.graph.nodes:
        if node.kind == "AllGather":
            waiting = makers[node.inputs[0]]
            assert waiting.kind == "Depend"
            found.append(waiting.inputs[1])
    return found


@pytest.mark.parametrize("half", [False, True])
def test_a_weight_is_gathered_for_each_pass_when_its_operator_is_due(half):
    parameters, inputs = {f"w{i}": BY_ROW for i in range(3)}, {"x": BY_ROW}
    sharded = shard_graph(chain(half=half), GRID, parameters, inputs, gathers_outputs=False, reshards=True)
    waits = gathers(sharded)
    assert waits[1:3] == ["h0", "h1"] and waits[4:] == ["g2", "g1"] and len(waits) == 6
    weights = {f"cast{i}" if half else f"w{i}" for i in range(3)}
    assert all(sharded.layouts[name].dims == BY_ROW for name in weights)
    once = shard_graph(chain(half=half), GRID, parameters, inputs, gathers_outputs=False)
    assert [c.kind for c in once.communications] == ["AllGather"] * 3


def test_a_pipeline_does_not_gather_it_once_for_all_microbatches():
    parameters, inputs = {f"w{i}": BY_ROW for i in range(3)}, {"x": BY_ROW}
    for reshards, number in ((False, 3), (True, 0)):
        sharded = shard_graph(chain(), GRID, parameters, inputs, gathers_outputs=False, reshards=reshards)
        assert len(of_parameters_alone(sharded.graph).kept) == number
        marked = [node for node in sharded.graph.nodes if node.attributes.get(OF_THIS_PASS)]
        assert len(marked) == (6 if reshards else 0)


def test_a_written_weight_is_gathered_anew():
    graph = chain(1)
    graph.nodes.append(Node("Assign", ("w0", "w0"), ("new",), (SQUARE,), {"side_effect_mem": True}))
    graph.nodes.append(
        Node("MatMul", ("x", "w0", "f", "f"), ("after",), (SQUARE,), scope=Scope("layers.0", False, "after"))
    )
    graph.outputs.append("after")
    sharded = shard_graph(graph, GRID, {"w0": BY_ROW}, {"x": BY_ROW}, gathers_outputs=False, reshards=True)
    kinds = [node.kind for node in sharded.graph.nodes]
    assert kinds.count("AllGather") == 3 and kinds.index("Assign") < len(kinds) - 1 - kinds[::-1].index("AllGather")


def test_layers_of_a_stage_are_never_gathered_all_at_once():
    """The last use of a gathered weight comes before the weight after the next one is gathered."""
    parameters, inputs = {f"w{i}": BY_ROW for i in range(5)}, {"x": BY_ROW}
    sharded = shard_graph(chain(5), GRID, parameters, inputs, gathers_outputs=False, reshards=True)
    nodes = sharded.graph.nodes
    last = {name: i for i, node in enumerate(nodes) for name in node.flat_inputs()}
    made = [(i, last[node.outputs[0]]) for i, node in enumerate(nodes) if node.kind == "AllGather"]
    alive = [sum(start <= i <= end for start, end in made) for i in range(len(nodes))]
    assert max(alive) == 1 and np.count_nonzero(alive) > 5


@pytest.mark.parametrize(("reshards", "number"), [(False, 3), (True, 6)])
def test_a_cast_that_is_recomputed_is_not_gathered_again_but_to_reshard(reshards, number):
    graph = chain(half=True)
    place = next(i for i, node in enumerate(graph.nodes) if node.outputs[0] == "g2")
    backward = [
        replace(node, inputs=tuple(name.replace("cast", "again") for name in node.inputs))
        for node in graph.nodes[place:]
    ]
    repeated = [
        Node("Cast", (f"w{i}", f"d{i}"), (f"again{i}",), (SQUARE,), scope=Scope("", True, f"again{i}", "", f"cast{i}"))
        for i in range(3)
    ]
    graph.nodes[place:] = [*repeated, *backward]
    parameters = {f"w{i}": BY_ROW for i in range(3)}
    sharded = shard_graph(graph, GRID, parameters, {"x": BY_ROW}, gathers_outputs=False, reshards=reshards)
    assert [c.kind for c in sharded.communications] == ["AllGather"] * number


def test_each_stage_gathers_a_weight_that_several_share():
    graph = chain(2)
    del graph.parameters["w1"]
    graph.nodes = [replace(node, inputs=tuple("w0" if n == "w1" else n for n in node.inputs)) for node in graph.nodes]
    sharded = shard_graph(graph, GRID, {"w0": BY_ROW}, {"x": BY_ROW}, gathers_outputs=False, reshards=True)
    stages = cut_into_stages(sharded.graph, {"layers.0": 0, "layers.1": 1})
    for one, made in stages.passes.items():
        assert [node.kind for node in made.graph.nodes].count("AllGather") == 1, one
        assert not any(name.startswith("AllGather") for name in (*made.taken, *made.given)), one
    assert {one.part for one in stages.passes} == {0, 1} and len(stages.passes) >= 3
