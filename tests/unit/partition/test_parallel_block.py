# SPDX-License-Identifier: Apache-2.0
"""Attention and MLP side by side, whose results are added up."""

import numpy as np
import pytest
from graphs import Builder, check

from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.operation import Pin

GRID = DeviceGrid({"dp": 2, "tp": 2})


def parallel_block(random, is_read_twice):
    """x + attention(x) + mlp(x), with a product of columns and one of rows in place of each of the two."""
    b = Builder()
    x = b.tensor("x", random.standard_normal((8, 4)))
    results = []
    for name in ("attention", "mlp"):
        b.tensor(f"{name}1", random.standard_normal((12, 4)), is_parameter=True)
        b.tensor(f"{name}2", random.standard_normal((4, 12)), is_parameter=True)
        inner = b.node("Tanh", b.node("MatMul", x, f"{name}1", False, True))
        results.append(b.node("MatMul", inner, f"{name}2", False, True, path=f"{name}.matmul"))
    total = b.node("Add", x, b.node("Add", *results, path="mlp_add"), path="attention_add")
    return b, [total, *([b.node("Square", results[0])] if is_read_twice else [])]


@pytest.mark.parametrize("rows", [("dp",), ("dp", "tp")], ids=["reduced", "scattered"])
@pytest.mark.parametrize("is_read_twice", [False, True])
def test_results_of_a_parallel_block_are_added_before_ranks_reduce_them(rows, is_read_twice):
    b, outputs = parallel_block(np.random.default_rng(1), is_read_twice)
    parameters = {f"{name}{i}": ((("tp",), ()), ((), ("tp",)))[i - 1] for name in ("attention", "mlp") for i in (1, 2)}
    whole, by_rows = (("dp",), ()), (rows, ())
    product = Pin(((("dp",), ("tp",)), ((), ("tp",))), (by_rows,))
    pinned = {"attention.matmul": product, "mlp.matmul": product}
    pinned |= {f"{name}_add": Pin((by_rows, by_rows)) for name in ("attention", "mlp")}
    sharded = check(b, outputs, GRID, parameters, {"x": whole}, pinned)
    kind, other = ("AllReduce", "ReduceScatter") if rows == ("dp",) else ("ReduceScatter", "AllReduce")
    kinds = [c.kind for c in sharded.communications if c.axes == ("tp",)]
    assert kinds.count(kind) == 1 + is_read_twice and other not in kinds
