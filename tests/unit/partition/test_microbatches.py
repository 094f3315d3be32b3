# SPDX-License-Identifier: Apache-2.0
"""A graph divided into microbatches gives what it gives of the whole batch, or says why it cannot be divided."""

import numpy as np
import pytest
from graphs import COMPUTE_ALL, Builder, of_primitive

from sporeloom.partition.graph import IsFirst, Node, RankOffset, TensorType
from sporeloom.partition.grid import MICROBATCHES, DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.microbatches import NUMBER, divide
from sporeloom.partition.propagate import shard_graph
from sporeloom.partition.redistribute import redistribution
from sporeloom.partition.sharded_graph import MixedRowsError

COUNT = 3
GRID = DeviceGrid({MICROBATCHES: COUNT})
BY_ROW = ((MICROBATCHES,), ())
RANDOM = np.random.default_rng(5)


def computed(graph, values):
    """What a graph without collectives gives; writes are in `values` afterwards, under the parameter's name."""
    for node in graph.nodes:
        if node.kind == "Constant":
            by_rank = isinstance(node.value, (RankOffset, IsFirst))
            assert not by_rank or not node.value.axes
            values[node.outputs[0]] = float(isinstance(node.value, IsFirst)) if by_rank else node.value
            continue
        if node.kind in ("UpdateState", "Depend"):
            values[node.outputs[0]] = values.get(node.inputs[0])
            continue
        given = [tuple(values[n] for n in name) if isinstance(name, tuple) else values[name] for name in node.inputs]
        result = COMPUTE_ALL[node.kind](*given, **of_primitive(node.attributes))
        results = result if isinstance(result, tuple) else (result,)
        for name, each, type in zip(node.outputs, results, node.types, strict=True):
            assert type is None or np.shape(each) == type.shape, node
            values[name] = each
        if node.kind == "Assign":
            values[node.inputs[0]] = results[0]
    return [values[name] for name in graph.outputs]


def run(divided, values):
    """The four graphs, as the host runs them."""
    values = dict(values)
    values |= zip(divided.drawn, computed(divided.once, dict(values)), strict=True)
    batches = []
    for number in range(COUNT):
        rows = {name: np.split(values[source], COUNT, dim)[number] for name, (source, dim) in divided.rows.items()}
        batches.append(rows | {f"{NUMBER}{dtype}": np.array(number, dtype) for dtype in ("int32", "int64")})

    def totals(graph, wanted):
        given = [dict(zip(graph.outputs, computed(graph, {**values, **rows}), strict=True)) for rows in batches]
        for name, (source, dim) in wanted.items():
            parts = [each[source] for each in given]
            values[name] = sum(parts) if dim is None else np.concatenate(parts, dim)

    totals(divided.early, divided.early_totals)
    totals(divided.main, divided.totals)
    return computed(divided.after, values), values


def divided_of(b, outputs, inputs=None):
    b.graph.outputs = list(outputs)
    return divide(shard_graph(b.graph, GRID, {}, inputs or {"x": BY_ROW}).graph, GRID)


def check(b, outputs, inputs=None):
    divided = divided_of(b, outputs, inputs)
    given = {name: b.values[name] for name in (*b.graph.inputs, *b.graph.parameters)}
    found, values = run(divided, given)
    for name, each in zip(outputs, found, strict=True):
        np.testing.assert_allclose(each, b.values[name], rtol=1e-12, err_msg=name)
    return divided, values


def layer():
    b = Builder()
    x = b.tensor("x", RANDOM.normal(size=(6, 4)))
    w = b.tensor("w", RANDOM.normal(size=(4, 5)), is_parameter=True)
    return b, x, w, b.node("MatMul", x, w, False, False)


def sum_of(b, value, *dims):
    return b.node("ReduceSum", value, dims, False)


def test_a_sum_is_added_up_and_rows_are_put_side_by_side():
    b, _, _, h = layer()
    divided, _ = check(b, [sum_of(b, h, 0, 1), h])
    assert sorted(total.dim is None for total in divided.totals.values()) == [False, True]
    assert {type.shape for type in divided.main.inputs.values()} == {(2, 4)}
    assert not divided.early.nodes and not divided.once.nodes


def test_an_update_by_a_gradient_comes_after_all_microbatches():
    b, x, w, h = layer()
    gradient = b.node("MatMul", x, h, True, False)
    step = b.node("Sub", w, b.node("Muls", b.node("Mul", gradient, gradient), 0.1))  # of the sum squared
    written = b.node("Assign", w, step, side_effect_mem=True)
    divided, values = check(b, [written])
    np.testing.assert_allclose(values["w"], b.values[step])
    assert [node.kind for node in divided.after.nodes if node.kind in ("Mul", "Assign")] == ["Mul", "Assign"]
    assert "Mul" not in {node.kind for node in divided.main.nodes}


def test_a_mean_over_what_counts_knows_the_number_before():
    """As the loss of tokens under a mask, whose gradient each row has divided by the number."""
    b, _, _, h = layer()
    mask = b.tensor("mask", (RANDOM.random((6, 5)) > 0.4).astype(float))
    counted = sum_of(b, mask, 0, 1)
    weighed = b.node("Mul", h, mask)
    divided, _ = check(
        b,
        [b.node("Div", sum_of(b, weighed, 0, 1), counted), b.node("Div", weighed, counted)],
        {"x": BY_ROW, "mask": BY_ROW},
    )
    assert len(divided.early_totals) == 1 and "w" not in divided.early.parameters
    assert set(divided.early_totals) <= set(divided.main.inputs)


def test_random_numbers_are_drawn_once_for_all_rows():
    b, _, _, h = layer()
    drawn = b.node("Mystery", np.arange(30.0).reshape(6, 5), side_effect_hidden=True)
    divided, _ = check(b, [sum_of(b, b.node("Mul", h, drawn), 0, 1), sum_of(b, drawn, 0, 1)])
    assert [node.kind for node in divided.once.nodes if node.kind == "Mystery"] == ["Mystery"]
    assert not [node for graph in (divided.main, divided.after) for node in graph.nodes if node.kind == "Mystery"]


def test_rows_of_what_all_have_are_found_by_number():
    """Of a parameter with a row for each of the batch, and of a sum of the inputs that is broadcast."""
    b, x, _, h = layer()
    table = b.tensor("table", RANDOM.normal(size=(6, 5)), is_parameter=True)
    spread = b.node("BroadcastTo", sum_of(b, x, 0, 1), (6, 5))
    divided, _ = check(b, [sum_of(b, b.node("Mul", b.node("Mul", h, table), spread), 0, 1)])
    assert f"{NUMBER}int32" in divided.main.inputs


def test_a_place_among_all_rows_is_found_by_number():
    b = Builder()
    x = b.tensor("x", RANDOM.normal(size=(6, 4)))
    sharded = shard_graph(b.graph, GRID, {}, {x: BY_ROW})
    (rows,) = (node.outputs[0] for node in sharded.graph.nodes)
    type = TensorType((), "int64")
    sharded.graph.nodes += [
        Node("Constant", (), ("first",), (type,), value=RankOffset((MICROBATCHES,), 2)),
        Node("Mul", (rows, "first"), ("weighed",), (TensorType((2, 4), "float64"),)),
        Node("MatMul", ("w", "weighed", "no", "no"), ("h",), (TensorType((1, 4), "float64"),)),
        Node("AllReduce", ("h",), ("total",), (TensorType((1, 4), "float64"),), {"axes": (MICROBATCHES,), "op": "sum"}),
    ]
    sharded.graph.nodes.insert(0, Node("Constant", (), ("no",), (None,), value=False))
    sharded.graph.parameters["w"], sharded.graph.outputs = TensorType((1, 2), "float64"), ["total"]
    found, _ = run(divide(sharded.graph, GRID), {x: b.values[x], "w": np.ones((1, 2))})
    expected = (b.values[x] * np.repeat([0, 2, 4], 2)[:, None]).sum(0, keepdims=True)
    np.testing.assert_allclose(found[0], expected)


def normalized_over_the_batch(b, x, w, h):
    return [b.node("Sub", h, b.node("BroadcastTo", b.node("Muls", sum_of(b, h, 0), 1 / 6), (6, 5)))]


def largest_over_the_batch(b, x, w, h):
    return [b.node("ReduceMax", h, (0,), False)]


def written_by_rows(b, x, w, h):
    state = b.tensor("state", np.zeros((6, 5)), is_parameter=True)
    return [b.node("Assign", state, h, side_effect_mem=True)]


def trained_twice(b, x, w, h):
    """The second gradient is of the updated weight: of a whole other pass."""
    gradient = b.node("MatMul", x, h, True, False)
    written = b.node("Assign", w, b.node("Sub", w, gradient), side_effect_mem=True)
    return [sum_of(b, b.node("MatMul", x, written, False, False), 0, 1)]


@pytest.mark.parametrize("make", [normalized_over_the_batch, largest_over_the_batch, trained_twice])
def test_what_mixes_rows_is_not_divided(make):
    b, x, w, h = layer()
    with pytest.raises(MixedRowsError, match=r" in the network "):
        divided_of(b, make(b, x, w, h))


def test_a_state_by_row_is_put_together_before_it_is_written():
    b, x, w, h = layer()
    _, values = check(b, written_by_rows(b, x, w, h))
    np.testing.assert_allclose(values["state"], b.values[h])


def test_sums_over_microbatches_come_first_and_alone():
    grid = DeviceGrid({MICROBATCHES: 2, "dp": 2})
    source = ValueLayout(((), ()), frozenset([MICROBATCHES, "dp"]))
    steps = redistribution(source, ValueLayout((("dp",), ())), grid)
    in_order = [("all_reduce", (MICROBATCHES,)), ("reduce_scatter", ("dp",))]
    assert [(step.kind, step.axes) for step in steps] == in_order
    sharded = DeviceGrid({MICROBATCHES: 2, "dp": 2}, scatters_first=True)  # as gradients that are added up in shards
    steps = redistribution(source, ValueLayout((("dp",), ())), sharded)
    assert [(step.kind, step.axes) for step in steps] == in_order[::-1]
    steps = redistribution(ValueLayout(((MICROBATCHES, "dp"), ())), ValueLayout(((), ())), grid)
    assert [(step.kind, step.axes) for step in steps] == [("all_gather", ("dp",)), ("all_gather", (MICROBATCHES,))]
