# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections (mHC): n residual streams side by side, (N, n*D). Source: arXiv:2512.24880; openPangu 2.0."""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.blocks import SandwichLayer
from sporeloom.nn.linear import Linear
from sporeloom.nn.norm import RMSNorm
from sporeloom.nn.parameter import declared_parameter

OFFSET = 1e-6
"""Added to the gates that read and to what Sinkhorn's normalization divides."""


class StreamReader(nn.Cell):
    """Gates of a part of a layer, and its input: sum over streams of gate * stream, (N, n*D) -> (N, D)."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, reads_only: bool = False):
        super().__init__()
        assert config.streams is not None
        self.streams, self.size = config.streams.num_streams, config.hidden_size
        n = self.streams
        groups = np.repeat([0], [n]) if reads_only else np.repeat([0, 1, 2], [n, n, n * n])
        self.norm = RMSNorm(specs.within("norm"), config.layer_norm_epsilon)
        self.gates = Linear(specs.within("gates"))
        self.alpha, self.beta = declared_parameter(specs["alpha"]), declared_parameter(specs["beta"])
        self.groups = Tensor(groups.astype(np.int32))
        self.alpha_of, self.scale, self.shift = ops.Gather(), ops.Mul(), ops.Add()
        self.cut, self.sigmoid, self.offset = ops.StridedSlice(), ops.Sigmoid(), ops.Add()
        self.split, self.column, self.weigh, self.add_up = ops.Reshape(), ops.ExpandDims(), ops.Mul(), ops.ReduceSum()
        self.to_float, self.back = ops.Cast(), ops.Cast()

    def construct(self, x, dropout_keys=None):
        """Returns the input of the part, and the gates before their activations, (N, n) or (N, n (n + 2))."""
        gates = self.scale(self.gates(self.norm(x), dropout_keys), self.alpha_of(self.alpha, self.groups, 0))
        gates = self.shift(gates, self.beta)
        rows, n = x.shape[0], self.streams
        read = self.offset(self.sigmoid(self.cut(gates, (0, 0), (rows, n), (1, 1))), OFFSET)
        streams = self.to_float(self.split(x, (rows, n, self.size)), mstype.float32)
        return self.back(self.add_up(self.weigh(streams, self.column(read, 2)), 1), x.dtype), gates


class StreamWriter(nn.Cell):
    """Stream d becomes gate_d * y + sum over streams s of C[s, d] * stream s, with C near a doubly stochastic matrix."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.streams is not None
        self.streams, self.size, self.rounds = config.streams.num_streams, config.hidden_size, config.streams.rounds
        self.cut, self.sigmoid, self.double = ops.StridedSlice(), ops.Sigmoid(), ops.Mul()
        self.split, self.softmax, self.offset = ops.Reshape(), ops.Softmax(-1), ops.Add()
        self.sums, self.not_zero, self.divide = ops.ReduceSum(keep_dims=True), ops.Add(), ops.Div()
        self.mix, self.column, self.row, self.spread = (
            ops.BatchMatMul(transpose_a=True),
            ops.ExpandDims(),
            ops.ExpandDims(),
            ops.Mul(),
        )
        self.to_float, self.write, self.join, self.back = ops.Cast(), ops.Add(), ops.Reshape(), ops.Cast()

    def construct(self, x, y, gates):  # (N, n*D), (N, D), (N, n (n + 2)) -> (N, n*D)
        rows, n = x.shape[0], self.streams
        write = self.double(self.sigmoid(self.cut(gates, (0, n), (rows, 2 * n), (1, 1))), 2.0)
        mixing = self.split(self.cut(gates, (0, 2 * n), (rows, 2 * n + n * n), (1, 1)), (rows, n, n))
        mixing = self.normalized(self.offset(self.softmax(mixing), OFFSET), 1)
        for _ in range(self.rounds - 1):
            mixing = self.normalized(self.normalized(mixing, 2), 1)
        streams = self.to_float(self.split(x, (rows, n, self.size)), mstype.float32)
        own = self.spread(self.column(write, 2), self.row(self.to_float(y, mstype.float32), 1))
        return self.back(self.join(self.write(own, self.mix(mixing, streams)), (rows, n * self.size)), x.dtype)

    def normalized(self, mixing, axis):
        return self.divide(mixing, self.not_zero(self.sums(mixing, axis), OFFSET))


class StreamLayer(SandwichLayer):
    """Attention and MLP, each between two norms, that read and write streams (B*T, n*D)."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type, layer: int):
        super().__init__(config, specs, dtype, layer)
        self.attention_streams = StreamReader(config, specs.within("attention_streams"))
        self.mlp_streams = StreamReader(config, specs.within("mlp_streams"))
        self.attention_write, self.mlp_write = StreamWriter(config), StreamWriter(config)
        of_norm = specs.within("block_norm")
        self.has_block_norm = bool(of_norm)
        if self.has_block_norm:
            self.block_norm = RMSNorm(of_norm, config.layer_norm_epsilon, dtype)

    def whole(
        self,
        x,
        bias,
        angles=None,
        slots=None,
        dropout_keys=None,
        tokens=None,
        shares=None,
        losses=None,
        groups=None,
        of_tokens=None,
    ):
        y, gates = self.attention_streams(x, dropout_keys)
        a = self.attention_norm(y)
        a, losses = self.attend(a, a, bias, angles, slots, dropout_keys, losses, of_tokens)
        x = self.attention_write(x, self.attention_output_norm(a), gates)
        y, gates = self.mlp_streams(x, dropout_keys)
        y, losses = self.feed_forward(self.mlp_norm(y), dropout_keys, tokens, shares, losses, groups)
        x = self.mlp_write(x, self.mlp_output_norm(y), gates)
        if self.has_block_norm:
            x = self.block_norm(x)
        return x if tokens is None else (x, losses)
