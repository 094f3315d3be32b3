# SPDX-License-Identifier: Apache-2.0
"""What `parallelize` says of each parameter is held against the compiler whenever a graph is compiled."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore_partitioner import partition

from sporeloom.core.errors import ConfigError
from sporeloom.parallel.parallelize import parallelize
from sporeloom.runtime.by_mindspore.layouts import check_layouts
from sporeloom.strategy.loader import load_strategy


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


class InAMethod(Plain):
    def construct(self, x):
        return self.product(x, self.weight)

    def product(self, x, table):
        return self.matmul(x, table)


def compile_for(rank, net, write, more=""):
    """As the engine of that rank does it."""
    text = f"mesh: {{dp: 2, tp: 2}}\nrules:\n  operators:\n    matmul: [[dp, ~], [tp, ~]]\n{more}"
    strategy = load_strategy(write("s.yaml", text)).by_mindspore()
    parallelize(net, strategy)
    graph = partition(net.set_train(False), strategy, rank, [((8, 4), np.float32)])
    check_layouts(net, graph.layouts, graph.groups, rank, strategy.source)
    return graph


@pytest.mark.parametrize("rank", range(4))
def test_what_agrees_is_compiled(write, rank):
    ms.set_context(mode=ms.GRAPH_MODE)
    graph = compile_for(rank, Plain(), write)
    stored = graph.layouts["weight"].stored_slice((8, 4), rank, graph.groups)
    assert stored.slices[0] == slice(4 * (rank % 2), 4 * (rank % 2) + 4)


def test_a_parameter_handed_to_a_method_has_the_layout_of_its_operator(write):
    net = InAMethod()
    compile_for(1, net, write)
    (weight,) = net.parallel_report.parameters
    assert (weight.local_shape, weight.rule) == ((4, 4), f"{write('s.yaml', '')}:4")


def test_where_they_differ_both_layouts_are_told(write):
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(ConfigError) as caught:
        compile_for(1, Turned(), write)
    (problem,) = caught.value.problems
    for words in (
        "s.yaml:4: weight (4, 8)",
        "rank 1 holds [2:4, 0:8], layout [tp, ~]",
        "MindSpore compiled [0:4, 0:8]",
    ):
        assert words in problem


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("{dp: 24}", "MindSpore derives layouts on stages of 2^n ranks only, and no rule is for other"),
        ("{dp: 2, cp: 2}", "mesh.cp = 2, but no rule shards anything over cp"),
    ],
)
def test_meshes_that_the_rules_do_not_fill_are_refused(write, mesh, message):
    net = Plain()
    net.other = ops.MatMul()
    text = f"mesh: {mesh}\nrules:\n  operators:\n    matmul: [[dp, ~], [~, ~]]\n"
    with pytest.raises(ConfigError) as caught:
        parallelize(net, load_strategy(write("s.yaml", text)).by_mindspore())
    assert message in str(caught.value)


def test_a_lookup_that_leaves_an_axis_out_is_refused_for_mindspore(write):
    class Words(nn.Cell):
        def __init__(self):
            super().__init__()
            self.table, self.gather = Parameter(Tensor(np.ones((8, 4), np.float32))), ops.Gather()

        def construct(self, ids):
            return self.gather(self.table, ids, 0)

    text = "mesh: {dp: 2, cp: 2, tp: 2}\nrules:\n  operators:\n    gather: [[tp, ~], [dp, cp]]\n"
    parallelize(Words(), load_strategy(write("right.yaml", text)).by_mindspore())
    with pytest.raises(ConfigError) as caught:
        parallelize(Words(), load_strategy(write("s.yaml", text.replace("[dp, cp]", "[dp]"))).by_mindspore())
    message = "so the indices must be sharded over cp, too: [[tp, ~], [[dp, cp]]], or not at all"
    assert message in str(caught.value)
