# SPDX-License-Identifier: Apache-2.0
"""Cells around a custom network, with its batch sharded over dp; a function as a Cell; MindSpore's own Cells in a
form that can be sharded."""

from __future__ import annotations

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import FusedLSTM, StepwiseRNN, nn_func, own_primitives
from sporeloom.parallel.sharding import shard

MEAN_OF_OWN_ROWS = "SparseSoftmaxCrossEntropyWithLogits"
"""Operator that averages the rows of its input, on each rank those it has."""


class ShardBatch(nn.Cell):
    """`network` with its inputs sharded over dp. An input has the batch in dim 0 if that is as long as the first input's.

    Nothing moves: an identity with a layout is where MindSpore's propagation begins. Parameters keep their names.

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
        check_mode()
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


class ParallelNetwork(nn.Cell):
    """Result of `auto_parallel`: `network`, whose graph is sharded once it is compiled."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def __call__(self, *args, **kwargs):
        check_mode()
        return super().__call__(*args, **kwargs)

    def construct(self, *args, **kwargs):
        return self.network(*args, **kwargs)


def check_mode():
    """
    Raises:
        ConfigError: Cells are not compiled.
    """
    if ms.get_context("mode") != ms.GRAPH_MODE:
        raise ConfigError("a parallel network runs in graph mode: call ms.set_context(mode=ms.GRAPH_MODE) before it")


class FunctionCell(nn.Cell):
    """A function as a Cell, with the Cells that it uses, which own its parameters, and parameters that it uses besides."""

    def __init__(self, function, cells, parameters=()):
        super().__init__(auto_prefix=False)
        self.function = function
        for number, cell in enumerate(cells):
            setattr(self, f"cell_{number}", cell)
        for number, parameter in enumerate(parameters):
            setattr(self, f"parameter_{number}", parameter)

    def construct(self, *inputs, **named):
        return self.function(*inputs, **named)


class Gradients(nn.Cell):
    """Compute loss and gradients of a network."""

    def __init__(self, network, weights):
        super().__init__(auto_prefix=False)
        self.network, self.weights = network.set_grad(), ParameterTuple(weights)
        self.trained = {weight.name for weight in weights}
        self.grad = ops.GradOperation(get_by_list=True)

    def construct(self, *inputs):
        return self.network(*inputs), self.grad(self.network, self.weights)(*inputs)


class SparseCrossEntropy(nn.Cell):
    """`ops.SparseSoftmaxCrossEntropyWithLogits` of operators that average the rows of all ranks: MindSpore's own
    averages a rank's rows, so that each rank would report, and follow, its own mean."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.one_hot, self.losses, self.mean = ops.OneHot(), ops.SoftmaxCrossEntropyWithLogits(), ops.ReduceMean()
        self.one, self.zero = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)

    def construct(self, logits, labels):
        labels = self.one_hot(labels, logits.shape[-1], self.one, self.zero)
        return self.mean(self.losses(logits, labels)[0])


def average_over_all_rows(cell: nn.Cell) -> None:
    """Replace each operator of `cell` that averages the rows of one rank by one that averages over all."""
    held = {name: primitive for name, primitive in own_primitives(cell).items() if primitive.name == MEAN_OF_OWN_ROWS}
    for name, primitive in held.items():
        if not primitive.is_grad:
            delattr(cell, name)
            setattr(cell, name, SparseCrossEntropy())


def prepare_to_shard(net: nn.Cell) -> None:
    """Replace those of MindSpore's own Cells in `net` that cannot be sharded correctly by equivalent ones; and
    exclude parameters from optimizer parallel that no optimizer updates: a `construct` that does so needs them
    unsharded."""
    for parameter in net.get_parameters():
        if not parameter.requires_grad:
            parameter.parallel_optimizer = False
    for _, part in net.cells_and_names():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            _take_statistics_of_all_rows(part)
        elif type(part) is nn.GroupNorm:
            part.__class__ = _GroupNorm
        elif isinstance(part, nn.MultiheadAttention):
            nn_func.linear = _linear
        elif hasattr(part, "rnn") and isinstance(part.rnn, FusedLSTM):
            part.rnn = StepwiseRNN("LSTM")  # step by step; the one operator for all of them cannot be sharded


class _GroupNorm(nn.GroupNorm):
    """Group norm of operators that MindSpore shards; it derives no layout for the one that does all at once."""

    def _cal_output(self, x):
        shape = x.shape
        groups = x.reshape((shape[0], self.num_groups, -1))
        away = groups - groups.mean(2, keep_dims=True)
        variance = (away * away).mean(2, keep_dims=True)
        normal = (away / ops.sqrt(variance + self.eps)).reshape((shape[0], shape[1], -1))
        scale, shift = self.gamma.to(x.dtype).reshape((-1, 1)), self.beta.to(x.dtype).reshape((-1, 1))
        return (normal * scale + shift).reshape(shape)


def _take_statistics_of_all_rows(norm: nn.Cell) -> None:
    """Mean and variance over the rows of all ranks, as one device takes them.

    Sharded over dp, its operator would take those of its own rows. It gets the global batch instead: an all-gather, and
    every rank does the same. A rule for `bn_train` replaces this.
    """
    dims = 2 if isinstance(norm, nn.BatchNorm1d) else 4
    norm.bn_train.shard(((1,) * dims, (1,), (1,), (1,), (1,)))


def _linear(x, w, b):
    """`nn_func.linear`, which attention calls, without the transposed weight: with it MindSpore reduces the
    gradient of the first layer's weight only."""
    x = ops.MatMul(False, True)(x, w) if x.ndim == 2 else ops.matmul(x, w.swapaxes(-1, -2))
    return x if b is None else x + b
