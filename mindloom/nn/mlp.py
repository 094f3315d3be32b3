# SPDX-License-Identifier: Apache-2.0
"""The feed-forward part of a layer and its activations."""

import math

from mindspore import dtype as mstype
from mindspore import nn, ops

from mindloom.model_config import DecoderConfig
from mindloom.nn.dropout import Dropout
from mindloom.nn.linear import Linear


class ErfGelu(nn.Cell):
    """x * Phi(x), exactly: 0.5 x (1 + erf(x / sqrt 2))."""

    def __init__(self):
        super().__init__()
        self.scale, self.erf, self.shift, self.mul, self.half = ops.Mul(), ops.Erf(), ops.Add(), ops.Mul(), ops.Mul()

    def construct(self, x):
        phi = self.shift(self.erf(self.scale(x, 1 / math.sqrt(2.0))), 1.0)
        return self.half(self.mul(x, phi), 0.5)


class TanhGelu(nn.Cell):
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), MindSpore's nn.GELU()."""

    def __init__(self):
        super().__init__()
        self.gelu = ops.GeLU()

    def construct(self, x):
        return self.gelu(x)


class FastGelu(nn.Cell):
    """x * sigmoid(1.702 x)."""

    def __init__(self):
        super().__init__()
        self.scale, self.sigmoid, self.mul = ops.Mul(), ops.Sigmoid(), ops.Mul()

    def construct(self, x):
        return self.mul(x, self.sigmoid(self.scale(x, 1.702)))


ACTIVATIONS = {"gelu": ErfGelu, "gelu_tanh": TanhGelu, "fast_gelu": FastGelu}


class MLP(nn.Cell):
    """down(activation(up(x)))."""

    def __init__(self, config: DecoderConfig, dtype: mstype.Type):
        super().__init__()
        d, ffn = config.hidden_size, config.ffn_hidden_size
        self.up = Linear(d, ffn, 0.02, dtype)
        self.activation = ACTIVATIONS[config.activation]()
        self.down = Linear(ffn, d, 0.02 / math.sqrt(2 * config.num_layers), dtype)
        self.dropout = Dropout(config.dropout_rate)

    def construct(self, x, dropout_keys=None):  # (N, D) -> (N, D)
        return self.dropout(self.down(self.activation(self.up(x))), dropout_keys)
