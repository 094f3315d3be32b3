# SPDX-License-Identifier: Apache-2.0
"""What `parallelize` says of each parameter is held against the compiler whenever a graph is compiled."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindloom.errors import ConfigError
from mindloom.parallel.parallelize import parallelize
from mindloom.runtime.compile import partition
from mindloom.runtime.engine import Engine
from mindloom.strategy.loader import load_strategy


class Plain(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((8, 4), np.float32)), name="weight")
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x):
        return self.matmul(x, self.weight)


class Turned(Plain):
    """The rule is for what the operator is given, which is not the parameter as it is stored."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((4, 8), np.float32)), name="weight")
        self.turn = ops.Transpose()

    def construct(self, x):
        return self.matmul(x, self.turn(self.weight, (1, 0)))


def compile_for(rank, net, write, more=""):
    """As the engine of that rank does it."""
    text = f"mesh: {{dp: 2, tp: 2}}\nrules:\n  operators:\n    matmul: [[dp, ~], [tp, ~]]\n{more}"
    strategy = load_strategy(write("s.yaml", text))
    parallelize(net, strategy)
    graph = partition(net.set_train(False), strategy, rank, [((8, 4), np.float32)])
    engine = Engine.__new__(Engine)
    engine.strategy, engine.rank = strategy, rank
    engine._check_layouts(net, graph.layouts, graph.groups)
    return graph


@pytest.mark.parametrize("rank", range(4))
def test_what_agrees_is_compiled(write, rank):
    ms.set_context(mode=ms.GRAPH_MODE)
    graph = compile_for(rank, Plain(), write)
    assert graph.layouts["weight"].slices((8, 4), rank, graph.groups)[0] == slice(4 * (rank % 2), 4 * (rank % 2) + 4)


def test_where_they_differ_both_layouts_are_told(write):
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(ConfigError) as caught:
        compile_for(1, Turned(), write)
    (problem,) = caught.value.problems
    for words in (
        "s.yaml:4: weight (4, 8)",
        "rank 1 holds [2:4, 0:8], layout [tp, ~]",
        "MindSpore compiled [1:2, 0:8]",
    ):
        assert words in problem
