# SPDX-License-Identifier: Apache-2.0
"""Layers of a decoder: how attention and MLP stand on the residual stream x, (B*T, D)."""

from mindspore import dtype as mstype
from mindspore import nn, ops

from mindloom.models.config import ModelConfig
from mindloom.nn.attention import Attention
from mindloom.nn.mlp import MLP, GatedMLP
from mindloom.nn.norm import build_norm


class Block(nn.Cell):
    """What every layer has."""

    def __init__(self, config: ModelConfig, dtype: mstype.Type):
        super().__init__()
        self.attention_norm = build_norm(config, dtype)
        self.attention = Attention(config, dtype)
        self.attention_add = ops.Add()
        self.mlp = (GatedMLP if config.gated_mlp else MLP)(config, dtype)
        self.mlp_add = ops.Add()


class DecoderLayer(Block):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, dtype: mstype.Type):
        super().__init__(config, dtype)
        self.mlp_norm = build_norm(config, dtype)

    def construct(self, x, bias, angles=None, slots=None, dropout_keys=None):
        a = self.attention_norm(x)
        x = self.attention_add(x, self.attention(a, a, bias, angles, slots, dropout_keys))
        return self.mlp_add(x, self.mlp(self.mlp_norm(x), dropout_keys))


class OneNormLayer(Block):
    """x + attention(norm(x)) + mlp(norm(x)), on one norm. Source: arXiv:2204.02311 section 2."""

    def construct(self, x, bias, angles=None, slots=None, dropout_keys=None):
        a = self.attention_norm(x)
        both = self.mlp_add(self.attention(a, a, bias, angles, slots, dropout_keys), self.mlp(a, dropout_keys))
        return self.attention_add(x, both)


class SandwichLayer(Block):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). Source: arXiv:2504.07866 section 2.2."""

    def __init__(self, config: ModelConfig, dtype: mstype.Type):
        super().__init__(config, dtype)
        after_attention, after_mlp = config.sandwich_gains
        self.attention_output_norm = build_norm(config, dtype, after_attention)
        self.mlp_norm = build_norm(config, dtype)
        self.mlp_output_norm = build_norm(config, dtype, after_mlp)

    def construct(self, x, bias, angles=None, slots=None, dropout_keys=None):
        a = self.attention_norm(x)
        a = self.attention_output_norm(self.attention(a, a, bias, angles, slots, dropout_keys))
        x = self.attention_add(x, a)
        return self.mlp_add(x, self.mlp_output_norm(self.mlp(self.mlp_norm(x), dropout_keys)))


BLOCKS = {"sequential": DecoderLayer, "parallel": OneNormLayer, "sandwich": SandwichLayer}
