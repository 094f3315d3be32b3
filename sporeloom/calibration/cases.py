# SPDX-License-Identifier: Apache-2.0
"""Cases that are measured: graphs of one kind of operator each, in the sizes of small training steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mindspore import Tensor, mint, nn, ops
from numpy.typing import NDArray

from sporeloom.calibration import graphs
from sporeloom.calibration.samples import AT_ONCE, ATTENTION, LAUNCH, OPERATOR, PRODUCT, REFERENCE, WAIT_S

WIDTH = 256
"""Length of the rows that operators pass over."""
ITEM = 4
WAITING = 6
"""Operators that wait side by side."""
TENSORS = {False: (1 << 14, 1 << 17, 1 << 20), True: (1 << 14, 1 << 20)}
"""Whether it is quick -> sizes of tensors in elements."""
TIMES = {False: 8, True: 4}
"""Operators in a graph, as many of every size: what launches and calls take does not change the slope."""
PRODUCTS = {
    False: ((128, 128, 512), (256, 128, 2048), (256, 256, 1024), (512, 512, 512), (512, 512, 2048), (1024, 1024, 1024)),
    True: ((256, 256, 512), (512, 512, 1024)),
}
"""Rows, columns of the input and of the result."""
HEADS = {False: ((2, 4, 128, 32), (4, 8, 128, 64), (2, 8, 256, 64)), True: ((4, 8, 128, 64),)}
"""Sequences, heads, tokens, width of a head."""
LAUNCHES = {False: (4, 96, 288), True: (4, 24)}
QUICK_KINDS = (REFERENCE, "GeLU", "GeLUGrad", "Softmax", "SoftmaxBackward", "AdamWeightDecay")
"""The operators that are measured if it is quick; the others pass over memory at the rate of the first."""


@dataclass(frozen=True)
class Case:
    """A graph to measure; the fields are those of a Sample."""

    group: str
    kind: str
    times: int
    num_bytes: int
    cell: Any
    inputs: Sequence[NDArray[Any]]
    flops: int = 0
    also: dict[str, int] = field(default_factory=dict)
    replaced_by: Callable[..., Any] | None = None
    """Function that is called in place of the graph's operators."""


def compute_cases(quick: bool) -> Iterator[Case]:
    """All graphs that do not communicate. Operators stand after those that run along with them."""
    tiny = _floats(8, 16)
    for times in LAUNCHES[quick]:
        cell = graphs.Repeated(ops.Add(), times, 2)
        yield Case(LAUNCH, REFERENCE, times, 3 * tiny.nbytes, cell, [tiny] * (2 * times))
    for m, k, n in PRODUCTS[quick]:
        inputs = [_floats(m, k), _floats(k, n)] * 2
        moved = ITEM * (m * k + k * n + m * n)
        yield Case(PRODUCT, f"{m}x{k}x{n}", 6, moved, graphs.Repeated(graphs.Products(), 2, 2), inputs, 2 * m * k * n)
    for sequences, heads, tokens, width in HEADS[quick]:
        shape = (sequences, heads, tokens, width)
        inputs = [_floats(*shape)] * 6
        size = sequences * heads * tokens
        moved, flops = ITEM * size * (2 * width + tokens), 2 * size * tokens * width
        name = "x".join(map(str, shape))
        yield Case(ATTENTION, name, 12, moved, graphs.Repeated(graphs.Attention(), 2, 3), inputs, flops)
    for size in TENSORS[quick]:
        yield from (case for case in _passes(_rows(size), TIMES[quick]) if not quick or case.kind in QUICK_KINDS)
    yield Case(AT_ONCE, "waiting", WAITING, 0, graphs.SideBySide(ops.ReLU()), [tiny] * WAITING, replaced_by=_wait)


def _passes(x: NDArray[Any], times: int) -> Iterator[Case]:
    """Operators on tensors of one size, `times` of them in a graph."""

    def case(kind: str, operator: Any, inputs: Sequence[NDArray[Any]], moved: float, **also: int) -> Case:
        cell = graphs.Repeated(operator, times, len(inputs))
        return Case(OPERATOR, kind, times, int(moved), cell, list(inputs) * times, also=also)

    size, rows = x.nbytes, len(x)
    for kind, binary in {REFERENCE: ops.Add(), "Mul": ops.Mul(), "Sub": ops.Sub(), "Div": ops.Div()}.items():
        yield case(kind, binary, [x, x], 3 * size)
    unary: dict[str, Any] = {"Square": ops.Square(), "Exp": ops.Exp(), "GeLU": ops.GeLU(), "Softmax": ops.Softmax(-1)}
    unary |= {"Sqrt": ops.Sqrt(), "Tanh": ops.Tanh(), "Sigmoid": ops.Sigmoid(), "LayerNorm": graphs.LayerNorm(WIDTH)}
    for kind, operator in unary.items():
        yield case(kind, operator, [x], 2 * size)
    gradients = {"GeLU": ("GeLUGrad", 4), "Softmax": ("SoftmaxBackward", 3), "LayerNorm": ("LayerNormGrad", 3)}
    for kind, (gradient, passes) in gradients.items():
        yield case(gradient, graphs.Gradient(unary[kind]), [x, x], passes * size, **{kind: 2 * size})
    yield case("Muls", _scaled, [x], 2 * size)
    heads = x.reshape(1, -1, 8, WIDTH // 8)
    yield case("Transpose", _transposed, [heads], 2 * size)
    for kind, sums in {"ReduceSum": _summed, "SumExt": _summed_by_mint, "ReduceMax": _largest}.items():
        yield case(kind, sums, [x], size)
    ids = (np.arange(rows) * 7 % rows).astype(np.int32)
    yield case("Gather", _picked, [x, ids], 2 * size)
    yield case("UnsortedSegmentSum", _Scattered(rows), [x, ids], 2 * size)
    updates = graphs.OneAfterTheOther([graphs.Update(x.shape) for _ in range(times)])
    yield Case(OPERATOR, "AdamWeightDecay", times, 7 * size, updates, [x] * times)


def _wait(x: NDArray[Any]) -> NDArray[Any]:
    time.sleep(WAIT_S)
    return x


def _scaled(x: Any) -> Any:
    return mint.mul(x, 0.5)


def _transposed(x: Any) -> Any:
    return ops.Transpose()(x, (0, 2, 1, 3))


def _summed(x: Any) -> Any:
    return ops.ReduceSum()(x, 0)


def _summed_by_mint(x: Any) -> Any:
    return mint.sum(x, dim=0)


def _largest(x: Any) -> Any:
    return ops.ReduceMax()(x, -1)


def _picked(x: Any, ids: Any) -> Any:
    return ops.Gather()(x, ids, 0)


class _Scattered(nn.Cell):
    def __init__(self, rows: int):
        super().__init__()
        self.rows = rows

    def construct(self, x: Tensor, ids: Tensor) -> Any:
        return ops.UnsortedSegmentSum()(x, ids, self.rows)


def _floats(*shape: int) -> NDArray[Any]:
    return np.random.default_rng(0).random(shape, np.float32)


def _rows(size: int) -> NDArray[Any]:
    return _floats(size // WIDTH, WIDTH)


def collective_cell(kind: str, ranks: int) -> Callable[[Any], Any]:
    """A stand-in, whose result has the shape of a collective's."""
    if kind == "AllGather":
        return _Tiled(ranks)
    if kind == "ReduceScatter":
        return _Part(ranks)
    return ops.ReLU()


class _Tiled(nn.Cell):
    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks

    def construct(self, x: Tensor) -> Any:
        return ops.Tile()(x, (self.ranks, 1))


class _Part(nn.Cell):
    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks

    def construct(self, x: Tensor) -> Any:
        return x[: x.shape[0] // self.ranks]
