# SPDX-License-Identifier: Apache-2.0
"""Cells around a user's network, its batch sharded over dp; a function as a Cell; what MindSpore's own need to be sharded."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindloom.errors import ConfigError
from mindloom.parallel.sharding import shard
from mindloom.private_names import FusedLSTM, StepwiseRNN, nn_func


class ShardBatch(nn.Cell):
    """`network` with its inputs sharded over dp. An input has the batch in dim 0 if that is as long as the first input's.

    Nothing moves: an identity with a layout tells MindSpore's propagation where to begin. Parameters keep their names.

    Args:
        mesh: its ranks along dp share the batch.
    """

    def __init__(self, network, mesh):
        super().__init__(auto_prefix=False)
        self.network = network
        self.dp = mesh.dp
        cuts = [ops.Identity() for _ in range(5)]
        for further, cut in enumerate(cuts):
            shard(cut, [(("dp",), *[()] * further)], mesh)
        self.cut_1, self.cut_2, self.cut_3, self.cut_4, self.cut_5 = cuts

    def __call__(self, *args, **kwargs):
        if ms.get_context("mode") != ms.GRAPH_MODE:
            raise ConfigError(
                "a parallel network runs in graph mode: call ms.set_context(mode=ms.GRAPH_MODE) before it"
            )
        return super().__call__(*args, **kwargs)

    def construct(self, *inputs):
        if self.dp == 1:
            return self.network(*inputs)
        rows = inputs[0].shape[0]
        cut = ()
        for x in inputs:
            cut = (*cut, self.cut(x, rows))
        return self.network(*cut)

    def cut(self, x, rows):
        if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[0] != rows:
            return x
        if x.ndim == 1:
            return self.cut_1(x)
        if x.ndim == 2:
            return self.cut_2(x)
        if x.ndim == 3:
            return self.cut_3(x)
        if x.ndim == 4:
            return self.cut_4(x)
        if x.ndim == 5:
            return self.cut_5(x)
        return x


class FunctionCell(nn.Cell):
    """A function as a Cell, with the Cells that it uses: they own its parameters."""

    def __init__(self, function, cells):
        super().__init__(auto_prefix=False)
        self.function = function
        for number, cell in enumerate(cells):
            setattr(self, f"cell_{number}", cell)

    def construct(self, *inputs):
        return self.function(*inputs)


def average_over_all_rows(cell: nn.Cell) -> None:
    """Let `cell`, if it is a loss whose operator averages the rows it is given, average those of all ranks.

    `SparseSoftmaxCrossEntropyWithLogits` takes the mean inside: sharded over dp each rank would tell, and follow, the mean of
    its own rows. The cell has another way to the same value, whose mean MindSpore shards right.
    """
    if isinstance(cell, nn.SoftmaxCrossEntropyWithLogits) and cell.sparse and cell.reduction == "mean":
        cell.reduction = "mean over all ranks"  # compared with "mean" only; its ReduceMean stays


def prepare_to_shard(net: nn.Cell) -> None:
    """Give those of MindSpore's own Cells in `net` that cannot be sharded right another way to the same values."""
    for _, part in net.cells_and_names():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            _take_statistics_of_all_rows(part)
        elif isinstance(part, nn.MultiheadAttention):
            nn_func.linear = _linear
        elif hasattr(part, "rnn") and isinstance(part.rnn, FusedLSTM):
            part.rnn = StepwiseRNN("LSTM")  # step by step; the one operator for all of them cannot be sharded


def _take_statistics_of_all_rows(norm: nn.Cell) -> None:
    """Mean and variance over the rows of all ranks, as one device takes them.

    Sharded over dp, its operator would take those of its own rows. It is given the whole batch instead: an all-gather, and
    every rank does the same. A rule for `bn_train` replaces this.
    """
    dims = 2 if isinstance(norm, nn.BatchNorm1d) else 4
    norm.bn_train.shard(((1,) * dims, (1,), (1,), (1,), (1,)))


def _linear(x, w, b):
    """`nn_func.linear`, through which attention goes. That one transposes the weight first: MindSpore then adds up the
    gradient of the first layer's weight only.
    """
    x = ops.MatMul(False, True)(x, w) if x.ndim == 2 else ops.matmul(x, w.swapaxes(-1, -2))
    return x if b is None else x + b
