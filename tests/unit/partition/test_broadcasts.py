# SPDX-License-Identifier: Apache-2.0
"""Inputs that CPU kernels would broadcast with kept indices are tiled: the same bits, and no memory that stays."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from sporeloom.partition.broadcasts import tile_broadcasts
from sporeloom.partition.mindir import read_graph
from sporeloom.runtime import engine
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.strategy.config import SINGLE_DEVICE

rng = np.random.default_rng(3)
SHAPE = (4, 32, 512)
OPERATORS = {"Add": ops.Add, "Sub": ops.Sub, "Mul": ops.Mul, "RealDiv": ops.RealDiv}
SMALLER = {"a row": (512,), "a column": (4, 32, 1), "a matrix": (32, 512), "its own rank": (1, 32, 1)}
NOT_TILED = {"one element": (1,), "no dims": (), "the same": SHAPE}


class Broadcasting(nn.Cell):
    """An operator on an input and a parameter, either of which may be the smaller one."""

    dtype = ms.float32

    def __init__(self, kind, value, is_left):
        super().__init__()
        self.operator, self.is_left = OPERATORS[kind](), is_left
        self.weight = Parameter(Tensor(value), name="weight")

    def construct(self, x):
        return self.operator(self.weight, x) if self.is_left else self.operator(x, self.weight)


def value(shape):
    return np.asarray(rng.uniform(0.5, 2.0, shape), np.float32)


def kinds_in(net, x):
    graph = tile_broadcasts(read_graph(compile_for_one_device(net, [(x.shape, x.dtype)])))
    return [node.kind for node in graph.nodes]


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("shape", SMALLER.values(), ids=SMALLER)
def test_a_smaller_input_is_tiled(kind, shape, is_left, monkeypatch):
    monkeypatch.setattr(engine, "LARGE", 1)
    x, weight = value(SHAPE), value(shape)
    net = Broadcasting(kind, weight, is_left).set_train()
    assert "Tile" in kinds_in(net, x)
    got = Engine.start(SINGLE_DEVICE).run(net, Tensor(x)).asnumpy()
    function = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "RealDiv": np.divide}[kind]
    np.testing.assert_array_equal(got, function(weight, x) if is_left else function(x, weight))


@pytest.mark.parametrize("shape", NOT_TILED.values(), ids=NOT_TILED)
def test_what_keeps_no_indices_stays(shape):
    assert "Tile" not in kinds_in(Broadcasting("Mul", value(shape), False), value(SHAPE))


def test_a_small_result_stays():
    assert "Tile" not in kinds_in(Broadcasting("Mul", value(8), False), value((16, 8)))
