# SPDX-License-Identifier: Apache-2.0
"""Norms over the last dimension, computed in float32 whatever the input's dtype is."""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.parameter import declared_parameter


class LayerNorm(nn.Cell):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, with the biased variance."""

    def __init__(self, specs: ParameterSpecs, epsilon: float, dtype: mstype.Type = mstype.float32):
        super().__init__()
        self.dtype, self.has_bias = dtype, "bias" in specs
        self.weight = declared_parameter(specs["weight"])
        zeros = np.zeros(specs["weight"].shape, np.float32)
        self.bias = declared_parameter(specs["bias"]) if self.has_bias else Tensor(zeros)
        self.layer_norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=epsilon)
        self.cast = ops.Cast()

    def construct(self, x):  # (N, D) -> (N, D)
        y, _, _ = self.layer_norm(self.cast(x, mstype.float32), self.weight, self.bias)
        return self.cast(y, self.dtype)

    def operands(self):
        return (self.weight, self.bias) if self.has_bias else (self.weight,)


class RMSNorm(nn.Cell):
    """x / sqrt(mean(x^2) + epsilon) * weight. Source: arXiv:1910.07467."""

    def __init__(self, specs: ParameterSpecs, epsilon: float, dtype: mstype.Type = mstype.float32):
        super().__init__()
        self.weight = declared_parameter(specs["weight"])
        self.epsilon, self.dtype = epsilon, dtype
        self.rms_square, self.rms_mean, self.rms_shift = ops.Square(), ops.ReduceMean(keep_dims=True), ops.Add()
        self.rms_rsqrt, self.rms_normalize, self.rms_weigh, self.cast = ops.Rsqrt(), ops.Mul(), ops.Mul(), ops.Cast()

    def construct(self, x):  # (N, D) -> (N, D)
        x = self.cast(x, mstype.float32)
        scale = self.rms_rsqrt(self.rms_shift(self.rms_mean(self.rms_square(x), -1), self.epsilon))  # (N, 1)
        return self.cast(self.rms_weigh(self.rms_normalize(x, scale), self.weight), self.dtype)

    def operands(self):
        return (self.weight,)


def build_norm(config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type) -> nn.Cell:
    """The kind of norm a model has."""
    return (RMSNorm if config.norm == "rms" else LayerNorm)(specs, config.layer_norm_epsilon, dtype)
