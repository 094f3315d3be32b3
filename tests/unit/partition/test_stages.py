# SPDX-License-Identifier: Apache-2.0
"""A microbatch's graph cut into passes, and an update's graph into stages, computed pass by pass in NumPy."""

from dataclasses import replace

import numpy as np
import pytest

from sporeloom.partition.graph import Graph, Node, Scope, TensorType
from sporeloom.partition.sharded_graph import PartitionError
from sporeloom.partition.stages import StagePass, cut_into_stages
from sporeloom.partition.updates import cut_updates

ROW, ONE = TensorType((3,), "float32"), TensorType((), "float32")
KINDS = {
    "Mul": np.multiply,
    "Add": np.add,
    "Square": np.square,
    "Sum": np.sum,
    "AddN": lambda items: sum(items),
    "Load": lambda x, monad: x,
    "Depend": lambda x, *others: x,
    "Sqrt": np.sqrt,
}


class Builder:
    """Writes a graph node by node."""

    def __init__(self, parameters, inputs):
        self.graph = Graph(dict.fromkeys(parameters, ROW), dict(inputs), [], [])
        self.graph.nodes.append(Node("Constant", (), ("u",), (None,), value=None))

    def put(self, kind, *inputs, cell="", type=ROW, of="", name="", backward=False, **attributes):
        output = name or f"{kind.lower()}{len(self.graph.nodes)}"
        scope = Scope(cell, backward or bool(of), output, of)
        self.graph.nodes.append(Node(kind, inputs, (output,), (type,), attributes, scope=scope))
        return output


def computed(graph, given, written=None):
    """What a graph returns; `written` gets the parameters that it writes."""
    values = dict(given)
    for node in graph.nodes:
        if node.kind in ("UpdateState",):
            continue
        inputs = [values.get(i) if isinstance(i, str) else tuple(values[n] for n in i) for i in node.inputs]
        if node.kind == "Constant":
            shape = node.types[0].shape if node.types[0] else ()
            values[node.outputs[0]] = None if node.value is None else np.full(shape, node.value)
        elif node.kind == "Assign":
            values[node.outputs[0]] = inputs[1]
            written[node.inputs[0]] = inputs[1]
        else:
            values[node.outputs[0]] = KINDS[node.kind](*inputs)
    return [values[name] for name in graph.outputs]


def chain(num_layers, tied=True, mask=True):
    """x -> w0 x -> w1 w0 x ..., the last layer times `table` again where that is tied to the first; loss and gradients."""
    b = Builder([*(f"w{i}" for i in range(num_layers)), "table"], {"x": ROW, "m": ROW})
    loads = [b.put("Load", f"w{i}", "u", cell=f"layers.{i}") for i in range(num_layers)]
    table = b.put("Load", "table", "u")
    hidden = b.put("Square", "m", cell="mask") if mask else "m"  # of no part
    h = [b.put("Mul", "x", table, cell="embedding")]
    before = []
    for i, load in enumerate(loads):
        before.append(b.put("Mul", h[-1], hidden, cell=f"layers.{i}"))
        h.append(b.put("Mul", before[-1], load, cell=f"layers.{i}"))
    last = b.put("Mul", h[-1], table, cell="head") if tied else h[-1]
    loss = b.put("Sum", last, cell="head", type=ONE)
    one = b.put("Constant")
    b.graph.nodes[-1] = Node("Constant", (), (one,), (ROW,), value=1.0)
    grads, dout, of_table = {}, one, []
    if tied:
        of_table.append(b.put("Mul", dout, h[-1], of=last))
        dout = b.put("Mul", dout, table, of=last)
    for i in reversed(range(num_layers)):
        grads[f"w{i}"] = b.put("Mul", dout, before[i], of=h[i + 1])
        dout = b.put("Mul", dout, loads[i], of=h[i + 1])
        dout = b.put("Mul", dout, hidden, of=before[i])
    of_table.append(b.put("Mul", dout, "x", of=h[0]))
    total = b.put("AddN", tuple(of_table), backward=True) if tied else of_table[0]
    total = b.put("Depend", total, "u")  # as MindSpore lets results wait for what is read
    b.graph.outputs = [loss, *(grads[f"w{i}"] for i in range(num_layers)), total]
    return b.graph


def parts_of(num_layers, num_parts):
    parts = {f"layers.{i}": i * num_parts // num_layers for i in range(num_layers)}
    return {**parts, "embedding": 0, "head": num_parts - 1}


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_passes_compute_what_the_whole_graph_does(num_parts, splits, tied):
    graph = chain(4, tied)
    random = np.random.default_rng(0)
    given = {name: random.normal(size=3) for name in [*graph.parameters, *graph.inputs]} | {"u": None}
    expected = computed(graph, given)
    cut = cut_into_stages(graph, parts_of(4, num_parts), splits, sums_from=1)
    results = [0.0] * len(graph.outputs)
    values = {}
    order = [StagePass("forward", part) for part in range(num_parts)]
    for part in reversed(range(num_parts)):
        order += [StagePass("backward", part), StagePass("weights", part)]
    for one in order:
        made = cut.passes.get(one)
        if made is None:
            continue
        names = list(graph.inputs)
        inputs = {name: given[name] for name in [*made.graph.parameters, *(names[i] for i in made.network_inputs)]}
        inputs |= {name: values[name] for name in made.taken}
        for name, value in zip(made.given, computed(made.graph, inputs), strict=True):
            values[name] = value
            for position, shares in enumerate(cut.results):
                results[position] += value if name in shares.values() else 0.0
    for got, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-12)
    assert {one.part for one in cut.passes} == set(range(num_parts))
    assert any(one.kind == "weights" for one in cut.passes) == splits


def test_a_weight_that_two_stages_use_is_held_by_both_and_each_gives_its_share():
    cut = cut_into_stages(chain(4), parts_of(4, 2), sums_from=1)
    assert cut.holders["table"] == [0, 1]
    assert set(cut.results[-1]) == {0, 1}
    crossing = [name for name, takers in cut.takers.items() if any(t.part != cut.givers[name].part for t in takers)]
    assert len(crossing) == 2  # the activation forward, its gradient back; no share of the table's


def test_what_belongs_to_no_part_is_computed_where_it_is_wanted():
    cut = cut_into_stages(chain(4), parts_of(4, 2), sums_from=1)
    for part in (0, 1):
        assert "Square" in {node.kind for node in cut.passes[StagePass("forward", part)].graph.nodes}
    without = cut_into_stages(chain(4, mask=False), parts_of(4, 2), sums_from=1)
    assert set(without.takers) <= set(cut.takers) | set(without.givers)


def test_gradients_of_weights_alone_are_passes_of_their_own():
    cut = cut_into_stages(chain(4, tied=False), parts_of(4, 2), splits_weights=True, sums_from=1)
    assert StagePass("backward", 0) not in cut.passes  # nobody waits for the first part's
    last = cut.passes[StagePass("backward", 1)]
    assert all(set(shares) == {0} for shares in cut.results[1:3])
    assert len(last.given) >= 1
    for name in last.given:
        assert StagePass("weights", 1) in cut.takers[name] or cut.takers[name][0].part == 0


def test_a_parameter_that_is_written_forward_is_read_there_alone():
    b = Builder(["state", "w"], {"x": ROW})
    state = b.put("Load", "state", "u")
    y = b.put("Mul", "x", state, cell="layers.0")
    done = b.put("Assign", "state", y, "u", cell="layers.0", side_effect_mem=True)
    w = b.put("Load", "w", "u")
    z = b.put("Mul", y, w, cell="layers.1")
    gradient = b.put("Mul", z, state, of=y)
    b.graph.outputs = [z, gradient]
    cut = cut_into_stages(b.graph, {"layers.0": 0, "layers.1": 1}, sums_from=1)
    forward = cut.passes[StagePass("forward", 0)].graph
    assert {node.kind for node in forward.nodes} >= {"Load", "Mul", "Assign"}
    assert forward.nodes[-1].kind == "Depend"
    assert done in forward.nodes[-1].inputs  # or nobody would compute it
    backward = cut.passes[StagePass("backward", 0)]
    assert "state" not in backward.graph.parameters  # the forward pass of the next microbatch has written it by then
    assert state in backward.taken


# Updates


def update():
    """w -= g / norm of all gradients, for weights a, b and a table that both stages hold; a rate all know."""
    b = Builder(["a", "b", "table", "rate", "m.a"], {"loss": ONE, "ga": ROW, "gb": ROW, "gt": ROW})
    squares = tuple(b.put("Sum", b.put("Square", gradient), type=ONE) for gradient in ("ga", "gb", "gt"))
    norm = b.put("Sqrt", b.put("AddN", squares, type=ONE), type=ONE)
    rate = b.put("Load", "rate", "u")
    written = []
    for name, gradient in (("a", "ga"), ("b", "gb"), ("table", "gt")):
        value = b.put("Add", b.put("Load", name, "u"), b.put("Mul", b.put("Mul", gradient, norm), rate))
        written.append(b.put("Assign", name, value, "u", side_effect_mem=True))
    moment = b.put("Add", b.put("Load", "m.a", "u"), "ga")
    written.append(b.put("Assign", "m.a", moment, "u", side_effect_mem=True))
    b.graph.outputs = [b.put("Depend", "loss", tuple(written), type=ONE), norm]
    return b.graph


HOLDERS = {"a": frozenset([0]), "b": frozenset([1]), "table": frozenset([0, 1]), "m.a": frozenset([0])}
GRADIENTS = {"loss": frozenset([1]), "ga": frozenset([0]), "gb": frozenset([1]), "gt": frozenset([0, 1])}


def run_stages(graphs, given):
    """All stages in step: what an AllReduce gets from each is added up. Returns outputs and written parameters of each."""
    values, written = [dict(each) for each in given], [{} for _ in graphs]
    todo = [list(graph.nodes) for graph in graphs]
    while any(todo):
        moved = False
        for stage, nodes in enumerate(todo):
            while nodes and nodes[0].kind != "AllReduce":
                node = nodes.pop(0)
                part = Graph({}, {}, [node], list(node.outputs))
                values[stage] |= zip(node.outputs, computed(part, values[stage], written[stage]), strict=True)
                moved = True
        waiting = [(stage, nodes[0]) for stage, nodes in enumerate(todo) if nodes]
        for _, node in waiting:
            alike = [(stage, other) for stage, other in waiting if other.outputs == node.outputs]
            if {stage for stage, _ in alike} == set(node.attributes["stages"]):
                total = sum(values[stage][other.inputs[0]] for stage, other in alike)
                for stage, other in alike:
                    values[stage][other.outputs[0]] = total
                    todo[stage].pop(0)
                moved = True
                break
        assert moved, "stages wait for each other"
    return [[values[i][name] for name in graph.outputs] for i, graph in enumerate(graphs)], written


def test_stages_together_update_as_one_device_does():
    graph, random = update(), np.random.default_rng(1)
    given = {name: random.normal(size=3) for name in [*graph.parameters, "ga", "gb", "gt"]} | {"loss": 2.5, "u": None}
    written = {}
    loss, norm = computed(graph, given, written)
    shares = random.normal(size=3)
    graphs = cut_updates(graph, 2, HOLDERS, GRADIENTS)
    of_stages = [dict(given), dict(given)]
    of_stages[0]["gt"], of_stages[1]["gt"] = shares, given["gt"] - shares
    of_stages[0] |= {"gb": np.nan, "loss": np.nan, "b": np.nan}  # which it has no use for
    of_stages[1] |= {"ga": np.nan, "a": np.nan, "m.a": np.nan}
    outputs, done = run_stages(graphs, of_stages)
    for stage in (0, 1):
        np.testing.assert_allclose(outputs[stage], [loss, norm], rtol=1e-12)
        assert set(done[stage]) == {name for name, stages in HOLDERS.items() if stage in stages}
        for name, value in done[stage].items():
            np.testing.assert_allclose(value, written[name], rtol=1e-12)
    assert set(graphs[0].inputs) == {"ga", "gt"}
    assert set(graphs[1].inputs) == {"loss", "gb", "gt"}


def test_the_norm_counts_a_shared_weight_once_and_is_one_sum_over_the_stages():
    graphs = cut_updates(update(), 2, HOLDERS, GRADIENTS)
    for graph in graphs:
        messages = [node for node in graph.nodes if node.kind == "AllReduce"]
        assert len(messages) == 3  # the table's gradient, the squares, and the loss, which all are told


def test_a_truth_value_of_one_stage_is_sent_to_others_as_a_number():
    b = Builder(["a", "b"], {"ga": ROW, "gb": ROW})
    truth = b.put("Square", b.put("Sum", "ga", type=ONE), type=TensorType((), "bool"))
    b.put("Assign", "b", b.put("Mul", truth, "gb"), "u", side_effect_mem=True)
    b.graph.outputs = ["ga"]
    holders = {"a": frozenset([0]), "b": frozenset([1])}
    first, second = cut_updates(b.graph, 2, holders, {"ga": frozenset([0]), "gb": frozenset([1])})
    kinds = [[node.kind for node in graph.nodes] for graph in (first, second)]
    assert "Select" in kinds[0] and "Select" not in kinds[1]
    (used,) = [node for node in second.nodes if node.kind == "NotEqual"]
    (sent,) = [node for node in second.nodes if node.kind == "AllReduce" and node.outputs[0] in used.inputs]
    assert sent.types == (TensorType((), "float32"),) and used.types == (TensorType((), "bool"),)
    assert next(node for node in second.nodes if node.kind == "Mul").inputs == (used.outputs[0], "gb")


def test_a_text_of_one_stage_is_refused_by_others():
    b = Builder(["a", "b"], {"ga": ROW, "gb": ROW})
    text = b.put("Square", b.put("Sum", "ga", type=ONE), type=TensorType((), "str"))
    b.put("Assign", "b", b.put("Mul", text, "gb"), "u", side_effect_mem=True)
    b.graph.outputs = ["ga"]
    with pytest.raises(PartitionError, match="only numbers are sent"):
        cut_updates(
            b.graph,
            2,
            {"a": frozenset([0]), "b": frozenset([1])},
            {"ga": frozenset([0]), "gb": frozenset([1])},
        )


def test_a_number_goes_to_the_tensors_and_no_tensor_to_the_number():
    """A norm that one stage alone knows scales the gradients of all: the number is sent, once."""
    builder = Builder(["w0", "w1"], {"g0": ROW, "g1": ROW})
    factor = builder.put("Sqrt", builder.put("Sum", builder.put("Square", "g0"), type=ONE), type=ONE)
    for i in range(2):
        scaled = builder.put("Mul", f"g{i}", factor)
        twice = builder.put("Mul", scaled, factor)
        builder.put("Assign", f"w{i}", twice, "u", type=ROW, side_effect_mem=True)
    builder.graph.outputs = [factor]
    stages = {f"{kind}{i}": frozenset([i]) for kind in "gw" for i in range(2)}
    graphs = cut_updates(builder.graph, 2, stages, {name: of for name, of in stages.items() if name.startswith("g")})
    for graph in graphs:
        sent = [node for node in graph.nodes if node.kind == "AllReduce"]
        assert [node.types[0] for node in sent] == [ONE]


def gathering(written=False):
    """Two layers of products with weights that are gathered, one of them twice: once more for the gradient, recomputed."""
    builder = Builder(["w0", "w1"], {"x": ROW})
    axes = {"axes": ("dp",), "dim": 0}
    x, results = "x", []
    for i in range(2):
        loaded = builder.put("Load", f"w{i}", "u", type=ROW)
        whole = builder.put("AllGather", loaded, **axes)
        builder.graph.nodes[-1] = replace(builder.graph.nodes[-1], scope=None)
        x = builder.put("Mul", x, whole, cell=f"layers.{i}")
        again = builder.put("AllGather", builder.put("Load", f"w{i}", "u", type=ROW), **axes)
        builder.graph.nodes[-1] = replace(builder.graph.nodes[-1], scope=None)
        results.append(builder.put("Mul", x, again, of=x, backward=True))
    if written:
        builder.put("Assign", "w0", x, "u", cell="layers.1", side_effect_mem=True)
    builder.graph.outputs = [x, *results]
    return builder.graph


@pytest.mark.parametrize("written", [False, True])
def test_weights_are_gathered_once_for_all_microbatches(written):
    """Unless the graph writes them."""
    cut = cut_into_stages(gathering(written), {"layers.0": 0, "layers.1": 1}, False, 1)
    gathers = {one: [node for node in made.graph.nodes if node.kind == "AllGather"] for one, made in cut.passes.items()}
    assert [one.part for one in sorted(gathers) if one.kind == "parameters"] == ([1] if written else [0, 1])
    for one, nodes in gathers.items():
        if one.kind == "parameters":
            assert len(nodes) == 1 and not cut.passes[one].network_inputs and not cut.passes[one].taken
            assert cut.passes[one].given == [nodes[0].outputs[0]]
        elif not written:
            assert not nodes


@pytest.mark.parametrize(
    ("keeps", "dtype", "expected"), [(True, "bfloat16", 2), (True, "float64", 0), (False, "bfloat16", 0)]
)
def test_weights_in_half_precision_are_cast_once_for_all_microbatches(keeps, dtype, expected):
    builder, row, x, results = Builder(["w0", "w1"], {"x": ROW}), TensorType((3,), dtype), "x", []
    for i in range(2):
        cast = builder.put("Cast", builder.put("Load", f"w{i}", "u"), "u", type=row, cell=f"layers.{i}")
        before, x = x, builder.put("Mul", x, cast, cell=f"layers.{i}")
        results.append(builder.put("Mul", before, cast, of=x, backward=True))
    builder.graph.outputs = [x, *results]
    passes = cut_into_stages(builder.graph, {"layers.0": 0, "layers.1": 1}, False, 1, keeps_casts=keeps).passes
    casts = {one: sum(node.kind == "Cast" for node in made.graph.nodes) for one, made in passes.items()}
    assert sum(number for one, number in casts.items() if one.kind == "parameters") == expected
    assert sum(number for one, number in casts.items() if one.kind != "parameters") == (0 if expected else 4)


def test_what_the_next_part_wants_gathered_is_sent_as_it_is():
    builder = Builder([], {"x": ROW})
    y = builder.put("Square", "x", cell="layers.0")
    whole = builder.put("AllGather", y, type=TensorType((6,), "float32"), axes=("tp",), dim=0)
    builder.graph.nodes[-1] = replace(builder.graph.nodes[-1], scope=None)
    builder.graph.outputs = [builder.put("Sum", whole, cell="layers.1", type=ONE)]
    cut = cut_into_stages(builder.graph, {"layers.0": 0, "layers.1": 1})
    first, second = (cut.passes[StagePass("forward", part)] for part in range(2))
    assert first.given == second.taken == [y]
    assert "AllGather" in {node.kind for node in second.graph.nodes}


def test_recomputation_that_waits_for_the_next_parts_gradient_stays_in_its_part():
    builder = Builder([], {"x": ROW})
    y = builder.put("Square", "x", cell="layers.0")
    z = builder.put("Square", y, cell="layers.0")
    loss = builder.put("Sum", builder.put("Square", z, cell="layers.1"), cell="layers.1", type=ONE)
    gradient = builder.put("Mul", z, z, of=loss, cell="layers.1")
    again = builder.put("Square", builder.put("Depend", y, gradient), cell="layers.0", backward=True)
    builder.graph.outputs = [loss, builder.put("Mul", gradient, again, backward=True, of=z)]
    cut = cut_into_stages(builder.graph, {"layers.0": 0, "layers.1": 1}, sums_from=1)
    crossing = {n for n, takers in cut.takers.items() for one in takers if one.part != cut.givers[n].part}
    assert crossing == {z, gradient}
