# SPDX-License-Identifier: Apache-2.0
"""Graphs of one kind of operator each, for measurements: compiled, loaded and called as those of a rank are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from sporeloom.runtime.cpu.pyfunc import add_pyfunc_primitive
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.runtime.spmd.program import LoadedProgram
from sporeloom.runtime.spmd.rank_graph import RankGraph

Shape = tuple[int, ...]


class Repeated(nn.Cell):
    """Applies an operator to several sets of inputs, one after the other; returns a number when all are done."""

    def __init__(self, operator: Any, times: int, arity: int):
        super().__init__()
        self.operator, self.times, self.arity = operator, times, arity

    def construct(self, ready: Tensor, *inputs: Tensor) -> Any:
        results = ()
        for i in range(self.times):
            own = inputs[i * self.arity : (i + 1) * self.arity]
            first = own[0] if i == 0 else ops.depend(own[0], results[-1])  # type: ignore[misc]
            results = (*results, self.operator(first, *own[1:]))  # type: ignore[assignment]
        return ops.depend(ready, results) + ready


class Products(nn.Cell):
    """A product and those of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.of_input = ops.MatMul(), ops.MatMul(transpose_b=True)
        self.of_weight = ops.MatMul(transpose_a=True)

    def construct(self, x: Tensor, weight: Tensor) -> Any:
        y = self.product(x, weight)
        return y, self.of_input(y, weight), self.of_weight(x, y)


class Attention(nn.Cell):
    """The products of attention, and those of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.second = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True)
        self.first = ops.BatchMatMul(transpose_a=True)

    def construct(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        scores = self.second(query, key)
        out = self.product(scores, value)
        of_scores = self.second(out, value)
        return self.first(scores, out), self.product(of_scores, key), self.first(of_scores, query)


class One(nn.Cell):
    """One operator."""

    def __init__(self, operator: Any):
        super().__init__()
        self.operator = operator

    def construct(self, x: Tensor) -> Any:
        return self.operator(x)


class Gradient(nn.Cell):
    """An operator and its gradient, for the gradient of the result and the input."""

    def __init__(self, operator: Any):
        super().__init__()
        self.operator, self.grad = One(operator), ops.GradOperation(sens_param=True)

    def construct(self, gradient: Tensor, x: Tensor) -> Any:
        return self.grad(self.operator)(x, gradient)


class LayerNorm(nn.Cell):
    """Layer normalization of the last dimension."""

    def __init__(self, size: int):
        super().__init__()
        self.gamma, self.beta = Tensor(np.ones(size, np.float32)), Tensor(np.zeros(size, np.float32))
        self.norm = ops.LayerNorm(-1, -1)

    def construct(self, x: Tensor) -> Any:
        return self.norm(x, self.gamma, self.beta)[0]


class Update(nn.Cell):
    """A step of AdamW for one parameter."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.update = ops.AdamWeightDecay()
        self.weight, self.first, self.second = (
            Parameter(Tensor(np.zeros(shape, np.float32)), name=name) for name in ("weight", "first", "second")
        )

    def construct(self, gradient: Tensor) -> Any:
        return self.update(self.weight, self.first, self.second, 1e-3, 0.9, 0.999, 1e-8, 0.0, gradient)


class OneAfterTheOther(nn.Cell):
    """Calls each of some Cells with an input of its own."""

    def __init__(self, cells: Sequence[nn.Cell]):
        super().__init__()
        self.cells_in_order = nn.CellList(cells)

    def construct(self, ready: Tensor, *inputs: Tensor) -> Any:
        results = ()
        for i in range(len(inputs)):
            results = (*results, self.cells_in_order[i](inputs[i]))  # type: ignore[assignment]
        return ops.depend(ready, results) + ready


class Padded(nn.Cell):
    """A Cell, and `count` tiny operators after it."""

    def __init__(self, cell: nn.Cell, count: int):
        super().__init__()
        self.cell, self.add, self.count = cell, ops.Add(), count

    def construct(self, ready: Tensor, *inputs: Tensor) -> Any:
        result = self.cell(ready, *inputs)
        for _ in range(self.count):
            result = self.add(result, ready)
        return result


class SideBySide(nn.Cell):
    """Applies an operator to several inputs, none of which waits for another; returns a number when all are done."""

    def __init__(self, operator: Any):
        super().__init__()
        self.operator = operator

    def construct(self, ready: Tensor, *inputs: Tensor) -> Any:
        results = ()
        for x in inputs:
            results = (*results, self.operator(x))  # type: ignore[assignment]
        return ops.depend(ready, results) + ready


def load(
    cell: nn.Cell, inputs: Sequence[NDArray[Any]], exchange: Callable[..., Any] | None = None, padding: int = 0
) -> Callable[[], None]:
    """Compile a Cell for inputs; returns what calls it once and waits for its end.

    Args:
        exchange: replaces every ReLU, Tile and StridedSlice of the graph, whose results have the shapes of its results.
        padding: number of tiny operators after it.
    """
    cell = Padded(cell, padding) if padding else cell
    tensors = [Tensor(array) for array in (np.zeros(1, np.float32), *inputs)]
    model = compile_for_one_device(cell, [(tuple(t.shape), t.asnumpy().dtype) for t in tensors])
    if exchange:
        _replace(model, exchange)
    owners = {parameter.name: parameter for parameter in cell.get_parameters()}
    program = LoadedProgram(RankGraph(model, {}, {}, 0), owners)

    def call() -> None:
        program.run(tensors).asnumpy()

    return call


STANDINS = ("ReLU", "Tile", "StridedSlice")


def _replace(model: Any, run: Callable[..., Any]) -> None:
    """Replace the stand-ins of a collective by calls of a function."""
    kinds = {f"REF::{primitive.name}": primitive.op_type for primitive in model.primitives}
    replaced = 0
    for node in model.graph.node:
        if kinds.get(node.op_type) in STANDINS:
            del node.input[1:]
            node.op_type = add_pyfunc_primitive(model, run)
            replaced += 1
    assert replaced, [kinds.get(node.op_type) for node in model.graph.node]


def start() -> None:
    """Let MindSpore compute in graph mode."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
