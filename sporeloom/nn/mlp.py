# SPDX-License-Identifier: Apache-2.0
"""The feed-forward part of a layer and its activations."""

import math

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.dropout import Dropout
from sporeloom.nn.linear import Linear


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


class SiLU(nn.Cell):
    """x * sigmoid(x)."""

    def __init__(self):
        super().__init__()
        self.sigmoid, self.mul = ops.Sigmoid(), ops.Mul()

    def construct(self, x):
        return self.mul(x, self.sigmoid(x))


ACTIVATIONS = {"gelu": ErfGelu, "gelu_tanh": TanhGelu, "fast_gelu": FastGelu, "silu": SiLU}


class MLP(nn.Cell):
    """down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__()
        self.up = Linear(specs.within("up"), dtype)
        self.activation = ACTIVATIONS[config.activation]()
        self.down = Linear(specs.within("down"), dtype)
        self.dropout = Dropout(config.dropout_rate)

    def construct(self, x, dropout_keys=None):  # (N, D) -> (N, D)
        return self.dropout(self.down(self.activation(self.up(x, dropout_keys)), dropout_keys), dropout_keys)

    def operands(self):
        return self.up.operands() + self.down.operands()


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)). Source: arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__(config, specs, dtype)
        self.gate = Linear(specs.within("gate"), dtype)
        self.gate_mul = ops.Mul()

    def construct(self, x, dropout_keys=None):  # (N, D) -> (N, D)
        y = self.gate_mul(self.activation(self.gate(x, dropout_keys)), self.up(x, dropout_keys))
        return self.dropout(self.down(y, dropout_keys), dropout_keys)

    def operands(self):
        return self.up.operands() + self.gate.operands() + self.down.operands()


def build_mlp(config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type) -> MLP:
    """The kind of MLP a model has."""
    return (GatedMLP if config.gated_mlp else MLP)(config, specs, dtype)
