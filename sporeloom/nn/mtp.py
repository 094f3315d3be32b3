# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: further layers that predict tokens beyond the next one. Source: arXiv:2412.19437 section 2.2;
the order of the concatenation and the hidden state before the final norm are those of the released Pangu models; after it,
as `mtp_input` says, those of DeepSeek-V3 in vLLM and Megatron-LM."""

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.blocks import BLOCKS
from sporeloom.nn.linear import Linear
from sporeloom.nn.norm import build_norm


class MTPLayer(nn.Cell):
    """A layer on project([norm(embedding of a later token); norm(h)]), where h (B*T, D) is the last layer's output or that of
    the depth before, or what the head reads of it. `head_norm` of its output goes to the model's head."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type, depth: int):
        super().__init__()
        self.embedding_norm = build_norm(config, specs.within("embedding_norm"), dtype)
        self.hidden_norm = build_norm(config, specs.within("hidden_norm"), dtype)
        self.both, self.project = ops.Concat(1), Linear(specs.within("project"), dtype)
        self.layer = BLOCKS[config.block](config, specs.within("layer"), dtype, config.num_layers + depth)
        self.head_norm = build_norm(config, specs.within("head_norm"), dtype)
        self.has_experts = config.experts is not None

    def construct(self, x, embedded, bias, angles, tokens, shares=None, losses=None, groups=None, of_tokens=None):
        x = self.project(self.both((self.embedding_norm(embedded), self.hidden_norm(x))))
        if self.has_experts or of_tokens is not None:
            return self.layer(
                x, bias, angles, None, None, tokens, shares, losses, groups, kept=None, of_tokens=of_tokens
            )
        return self.layer(x, bias, angles, None, None), losses


class MTPLosses(nn.Cell):
    """Loss of the depths: mtp_loss_weight times their mean."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.factor = config.mtp_loss_weight / config.num_mtp_layers
        self.scale, self.add = ops.Mul(), ops.Add()

    def construct(self, total, loss_of_depth):
        return self.add(total, self.scale(loss_of_depth, self.factor))
