# SPDX-License-Identifier: Apache-2.0
"""A trial of what every parallel run needs of this MindSpore: compile, export and shard a graph."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from sporeloom.parallel.parallelize import parallelize
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.runtime.spmd.shard import decide, partition_for_rank
from sporeloom.strategy.loader import strategy_of


class _Product(nn.Cell):
    def __init__(self):  # type: ignore[no-untyped-def]
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((4, 2), np.float32)), name="weight")
        self.matmul = ops.MatMul()

    def construct(self, x):  # type: ignore[no-untyped-def]
        return self.matmul(x, self.weight)


def shard_a_product() -> None:
    """Compile a matrix product for one device and shard its weight over two ranks.

    Raises:
        RuntimeError: the shard has another shape.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    net = _Product()
    rules = {"operators": {"matmul": [[None, "tp"], ["tp", None]]}}
    parallelize(net, strategy_of({"mesh": {"tp": 2}, "rules": rules}))
    model = compile_for_one_device(net, [((2, 4), np.float32)])
    graph, _ = partition_for_rank(model, decide(net, net.parallel_report.mesh), rank=1)
    if graph.parameters != {"weight": (2, 2)}:
        raise RuntimeError(f"the weight of 4 x 2 has become {graph.parameters}")
