# SPDX-License-Identifier: Apache-2.0
"""Gradients lie as what they are the gradients of: nothing is sent that the forward pass did not send."""

from dataclasses import replace

import numpy as np
import pytest
from graphs import COMPUTE_ALL, Builder, check, sent, type_of
from more_kinds import COMPUTE as MORE_COMPUTE

from sporeloom.partition.graph import Scope
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.operation import Pin

GRID = DeviceGrid({"dp": 2, "tp": 2})
TOKENS, WIDTH, WIDE = 16, 4, 8


def gradient(b, forward, kind, *inputs):
    """An operator of the gradient of the one that made `forward`."""
    name = b.node(kind, *inputs)
    b.graph.nodes[-1] = replace(b.graph.nodes[-1], scope=Scope(is_backward=True, forward=forward))
    return name


def residual_mlp():
    """x + tanh(x W1) W2 and the gradients of the sum of its squares, with respect to W1, W2 and x."""
    random, b = np.random.default_rng(5), Builder()
    x = b.tensor("x", random.standard_normal((TOKENS, WIDTH)))
    w1 = b.tensor("w1", random.standard_normal((WIDE, WIDTH)), is_parameter=True)
    w2 = b.tensor("w2", random.standard_normal((WIDTH, WIDE)), is_parameter=True)
    shifted = b.node("Tanh", x, path="norm")
    h = b.node("MatMul", shifted, w1, False, True, path="up.matmul")
    a = b.node("Tanh", h)
    y = b.node("MatMul", a, w2, False, True, path="down.matmul")
    out = b.node("Add", x, y, path="add")
    dy = b.node("Muls", out, 2.0)
    da = gradient(b, y, "MatMul", dy, w2, False, False)
    dw2 = gradient(b, y, "MatMul", dy, a, True, False)
    dh = gradient(b, a, "TanhGrad", a, da)
    d_shifted = gradient(b, h, "MatMul", dh, w1, False, False)
    dw1 = gradient(b, h, "MatMul", dh, shifted, True, False)
    dx = b.node("AddN", (dy, gradient(b, shifted, "TanhGrad", shifted, d_shifted)))
    return b, dw1, dw2, dx


def test_with_sequence_parallel_the_backward_pass_gathers_rows_as_the_forward_pass_does():
    b, dw1, dw2, dx = residual_mlp()
    rows, of_dp = (("dp", "tp"), ()), (("dp",), ())
    pinned = {
        "norm": Pin((rows,)),
        "up.matmul": Pin((of_dp, (("tp",), ()))),
        "down.matmul": Pin(((("dp",), ("tp",)), ((), ("tp",))), (rows,)),
        "add": Pin((rows, rows)),
    }
    sharded = check(b, [dw1, dw2, dx], GRID, {"w1": (("tp",), ()), "w2": ((), ("tp",))}, {"x": rows}, pinned)
    of_rows = TOKENS * WIDTH // 2 // 2  # a half of the rows of one replica
    # Forward the norm's rows, backward those of dy; after each second product they are scattered. No weight is gathered.
    scattered = [each for each in sent(sharded) if each[0] == "ReduceScatter"]
    gathered = [each for each in sent(sharded) if each[0] in ("AllGather", "AllToAll")]
    assert gathered == [("AllGather", ("tp",), of_rows)] * 2
    assert scattered == [("ReduceScatter", ("tp",), of_rows)] * 2


@pytest.mark.parametrize(
    "rule",
    [((("dp",), ("tp",)), (("tp",), ())), ((("dp", "tp"), ()), ((), ())), (((), ("dp", "tp")), (("dp",), ("tp",)))],
)
@pytest.mark.parametrize("of_dy", [(("dp", "tp"), ()), (("dp",), ("tp",)), ((), ("tp",)), (("tp",), ("dp",)), ((), ())])
@pytest.mark.parametrize("parameter", [((), ()), (("tp",), ()), ((), ("tp",)), (("dp", "tp"), ())])
def test_gradients_of_a_product_are_right_however_they_come(rule, of_dy, parameter):
    random, b = np.random.default_rng(6), Builder()
    x = b.tensor("x", random.standard_normal((8, 8)))
    dy = b.tensor("dy", random.standard_normal((8, 8)))
    w = b.tensor("w", random.standard_normal((8, 8)), is_parameter=True)
    y = b.node("MatMul", x, w, False, True, path="product")
    dx, dw = gradient(b, y, "MatMul", dy, w, False, False), gradient(b, y, "MatMul", dy, x, True, False)
    check(b, [y, dx, dw], GRID, {"w": parameter}, {"dy": of_dy}, {"product": Pin(rule)})


def test_of_two_tensors_of_one_shape_the_less_sharded_one_is_sliced():
    for names in (("x", "y"), ("y", "x")):
        b = Builder()
        for name in "xy":
            b.tensor(name, np.arange(16.0).reshape(8, 2))
        given = {"x": (("dp",), ()), "y": (("dp", "tp"), ())}
        assert not sent(check(b, [b.node("Mul", *names)], GRID, {}, given))


def gathered_rows(base, num_rows=4, length=3, kind="UnsortedSegmentSum"):
    """Rows added up by ids that count from `base[i]` on in row i: the gradient of a gather of a batch's own rows."""
    random, b = np.random.default_rng(7), Builder()
    dy = b.tensor("dy", random.standard_normal((num_rows, 6, 2)))
    chosen = b.tensor("chosen", random.integers(0, length, (num_rows, 6)))
    offsets = b.constant(np.array(base).reshape(num_rows, 1))
    b.graph.nodes[-1] = replace(b.graph.nodes[-1], types=(type_of(b.values[offsets]),))
    ids = b.node("Add", chosen, offsets)
    return b, b.node(kind, dy, ids, num_rows * length)


BY_ROW = [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("of_dy", "of_ids", "expected"),
    [
        ((("dp",), (), ()), (("dp",), ()), []),
        ((("dp", "tp"), (), ()), (("dp", "tp"), ()), []),
        ((("dp",), (), ("tp",)), (("dp",), ()), []),
        ((("dp",), (), ()), ((), ()), []),
        (((), (), ()), (("dp",), ()), []),
        # Tokens of a row are sharded over tp: its sums are pending.
        ((("dp",), ("tp",), ()), (("dp",), ()), [("AllReduce", ("tp",), 12)]),
        ((("dp",), ("tp",), ()), (("dp", "tp"), ()), []),  # dy is sliced anew: every rank was given all of it
    ],
)
def test_rows_with_ids_of_their_own_are_added_up_where_they_are(of_dy, of_ids, expected):
    b, total = gathered_rows(BY_ROW)
    assert sent(check(b, [b.node("Square", total)], GRID, {}, {"dy": of_dy, "chosen": of_ids})) == expected


@pytest.mark.parametrize("kind", ["UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"])
def test_other_reductions_of_rows_with_ids_of_their_own_are_right(kind, monkeypatch):
    monkeypatch.setitem(COMPUTE_ALL, kind, MORE_COMPUTE[kind])
    b, total = gathered_rows(BY_ROW, kind=kind)
    check(b, [b.node("Square", total)], GRID, {}, {"dy": (("dp",), ("tp",), ()), "chosen": (("dp",), ())})


@pytest.mark.parametrize("base", [[0, 3, 6, 8], [1, 4, 7, 9], [0, 2, 4, 6], [0, 0, 0, 0], [9, 6, 3, 0]])
def test_other_ids_are_not_taken_for_those_of_rows(base):
    b, total = gathered_rows(base)
    sharded = check(b, [b.node("Square", total)], GRID, {}, {"dy": (("dp",), (), ()), "chosen": (("dp",), ())})
    assert sent(sharded) == [("AllReduce", ("dp",), 24)]


def test_a_gradient_that_a_weight_and_a_norm_use_is_added_up_once():
    """x * w, rows sharded over tp, then a product by columns: the gradient of what goes into it is a pending sum, which the
    gradients of x and of w use."""
    random, b = np.random.default_rng(8), Builder()
    x = b.tensor("x", random.standard_normal((TOKENS, WIDTH)))
    scale = b.tensor("scale", random.standard_normal(WIDTH), is_parameter=True)
    w = b.tensor("w", random.standard_normal((WIDE, WIDTH)), is_parameter=True)
    scaled = b.node("Mul", b.node("Tanh", x, path="norm"), scale)
    y = b.node("MatMul", scaled, w, False, True, path="product")
    dy = b.node("Muls", y, 2.0)
    d_scaled = gradient(b, y, "MatMul", dy, w, False, False)
    dx = b.node("Square", gradient(b, scaled, "Mul", scale, d_scaled))
    d_scale = b.node("ReduceSum", gradient(b, scaled, "Mul", b.graph.nodes[0].outputs[0], d_scaled), (0,), False)
    rows = (("dp", "tp"), ())
    pinned = {"norm": Pin((rows,)), "product": Pin(((("dp",), ()), (("tp",), ())))}
    sharded = check(b, [dx, d_scale], GRID, {"w": (("tp",), ())}, {"x": rows}, pinned)
    of_rows = TOKENS * WIDTH // 2 // 2
    assert sent(sharded) == [("AllGather", ("tp",), of_rows), ("ReduceScatter", ("tp",), of_rows)]


def test_what_is_recomputed_lies_as_it_did_before():
    """A square product: its input has the shape of its output, and is not taken for the gradient of that."""
    random, b = np.random.default_rng(9), Builder()
    x = b.tensor("x", random.standard_normal((TOKENS, TOKENS)))
    w = b.tensor("w", random.standard_normal((TOKENS, TOKENS)), is_parameter=True)
    a = b.node("Tanh", x, path="activation")
    y = b.node("MatMul", a, w, False, True, path="product")
    again = b.node("Tanh", x, path="activation")
    b.graph.nodes[-1] = replace(b.graph.nodes[-1], scope=Scope(is_backward=True, again=a))
    dw = gradient(b, y, "MatMul", b.node("Muls", y, 2.0), again, True, False)
    by_rows = ((("dp",), ("tp",)), ((), ("tp",)))
    pinned = {"activation": Pin(by_rows[:1]), "product": Pin(by_rows, ((("dp", "tp"), ()),))}
    sharded = check(b, [b.node("Square", dw)], GRID, {"w": ((), ("tp",))}, {"x": (("dp",), ("tp",))}, pinned)
    # The rows of the gradient of y are gathered; of what was recomputed nothing is.
    assert [each for each in sent(sharded) if each[0] == "AllGather"] == [("AllGather", ("tp",), TOKENS * TOKENS // 4)]


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_narrow_pending_sum_stays_pending_where_its_product_is_added_to_others(is_nested):
    """As of keys with few heads: each rank has an addend of their narrow gradient, and of the wide one of queries."""
    random, b = np.random.default_rng(10), Builder()
    queries = b.tensor("queries", random.standard_normal((TOKENS, WIDE)))
    keys = b.tensor("keys", random.standard_normal((TOKENS, WIDE)))
    wide = b.tensor("wide", random.standard_normal((WIDE, WIDE)), is_parameter=True)
    narrow = b.tensor("narrow", random.standard_normal((2, WIDE)), is_parameter=True)
    one = b.tensor("one", random.standard_normal((WIDE, 2)))
    dq = b.node("MatMul", queries, wide, False, False)
    dk = b.node("MatMul", b.node("MatMul", keys, one, False, False), narrow, False, False)
    inner = dk
    if is_nested:
        inner = b.node("AddN", (dk, b.node("MatMul", b.node("MatMul", keys, one, False, False), narrow, False, False)))
    total = b.node("Square", b.node("AddN", (dq, inner)))
    by_columns = {"queries": ((), ("tp",)), "keys": ((), ("tp",)), "one": (("tp",), ())}
    sharded = check(b, [total], GRID, {"wide": (("tp",), ())}, by_columns)
    assert sent(sharded) == [("AllReduce", ("tp",), TOKENS * WIDE)]


@pytest.mark.parametrize(
    ("num_rows", "of_table", "expected"),
    [
        # Fewer tokens than rows of the table: what is added up is gathered, each rank adds its own rows, and dp is pending.
        (64, (("tp",), ()), [("AllGather", ("tp",), 16), ("AllReduce", ("dp",), 128), ("ReduceScatter", ("tp",), 16)]),
        # More tokens than rows: everybody's rows are added up.
        (4, (("tp",), ()), [("AllReduce", ("dp", "tp"), 24), ("ReduceScatter", ("tp",), 16)]),
        (64, ((), ()), [("AllReduce", ("dp", "tp"), 384)]),
    ],
)
def test_tokens_are_gathered_for_the_gradient_of_a_table_larger_than_they(num_rows, of_table, expected):
    """As a vocabulary-parallel embedding has it under sequence parallelism: tokens are sharded over tp, too."""
    random, b = np.random.default_rng(3), Builder()
    table = b.tensor("table", random.standard_normal((num_rows, WIDTH)), is_parameter=True)
    ids = b.tensor("ids", random.integers(0, num_rows, TOKENS))
    rows = b.node("Gather", table, ids, 0, path="word.gather")
    shifted = b.node("Tanh", rows, path="norm")
    d_rows = b.node("TanhGrad", shifted, b.node("Muls", shifted, 2.0))
    d_table = gradient(b, rows, "UnsortedSegmentSum", d_rows, ids, num_rows)
    pinned = {"word.gather": Pin((of_table, (("dp",),))), "norm": Pin(((("dp", "tp"), ()),))}
    sharded = check(b, [b.node("Square", d_table)], GRID, {"table": of_table}, {"ids": (("dp",),)}, pinned)
    assert sent(sharded) == expected
