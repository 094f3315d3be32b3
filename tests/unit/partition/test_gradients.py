# SPDX-License-Identifier: Apache-2.0
"""Gradients lie as what they are the gradients of: nothing is sent that the forward pass did not send."""

from dataclasses import replace

import numpy as np
import pytest
from test_propagate import Builder, check, sent, type_of

from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.operation import Pin

GRID = DeviceGrid({"dp": 2, "tp": 2})
TOKENS, WIDTH, WIDE = 16, 4, 8


def gradient(b, forward, kind, *inputs):
    """An operator of the gradient of the one that made `forward`."""
    name = b.node(kind, *inputs)
    b.graph.nodes[-1] = replace(b.graph.nodes[-1], forward=forward)
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


def gathered_rows(base, num_rows=4, length=3):
    """Rows added up by ids that count from `base[i]` on in row i: the gradient of a gather of a batch's own rows."""
    random, b = np.random.default_rng(7), Builder()
    dy = b.tensor("dy", random.standard_normal((num_rows, 6, 2)))
    chosen = b.tensor("chosen", random.integers(0, length, (num_rows, 6)))
    offsets = b.constant(np.array(base).reshape(num_rows, 1))
    b.graph.nodes[-1] = replace(b.graph.nodes[-1], types=(type_of(b.values[offsets]),))
    ids = b.node("Add", chosen, offsets)
    return b, b.node("UnsortedSegmentSum", dy, ids, num_rows * length)


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


@pytest.mark.parametrize("base", [[0, 3, 6, 8], [1, 4, 7, 9], [0, 2, 4, 6], [0, 0, 0, 0], [9, 6, 3, 0]])
def test_other_ids_are_not_taken_for_those_of_rows(base):
    b, total = gathered_rows(base)
    sharded = check(b, [b.node("Square", total)], GRID, {}, {"dy": (("dp",), (), ()), "chosen": (("dp",), ())})
    assert sent(sharded) == [("AllReduce", ("dp",), 24)]
