# SPDX-License-Identifier: Apache-2.0
"""Layers of a decoder: how attention and MLP read and write the residual stream x, (B*T, D).

In a model whose layers have losses of their own, of routers (see `sporeloom.nn.moe`) or attention (`sporeloom.nn.indexer`,
`sporeloom.nn.max_logits`), every layer is also given tokens (B, T), while training the shares of the loss, groups of tokens,
the losses of the layers below, and `of_tokens`: the part of the loss of each token, (B, T), and the mask of padding,
(B, 1, T), where something needs it. It returns x and the losses with its own.
"""

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.attention import Attention
from sporeloom.nn.latent_attention import LatentAttention
from sporeloom.nn.linear import MAX_KERNEL_ROWS
from sporeloom.nn.mlp import build_mlp
from sporeloom.nn.moe import MoE
from sporeloom.nn.norm import build_norm


class Block(nn.Cell):
    """Base of all layers. Subclasses define in `whole` the computation for all tokens of the input."""

    has_kernel = False
    """Whether few tokens, with a cache, go through a compiled kernel of the full layer
    (`sporeloom.inference.kernels`)."""
    drops_tokens = False
    """Whether it processes only the tokens sampled for it (`sporeloom.nn.token_drop`)."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type, layer: int):
        super().__init__()
        self.attention_norm = build_norm(config, specs.within("attention_norm"), dtype)
        self.attention = (LatentAttention if config.latent else Attention)(config, specs.within("attention"), dtype)
        self.attention_add = ops.Add()
        self.has_experts = config.has_experts(layer)
        if self.has_experts:
            self.mlp, self.losses_add = MoE(config, specs.within("mlp"), dtype, layer), ops.Add()
        else:
            self.mlp = build_mlp(config, specs.within("mlp"), dtype)
        self.attention_losses_add = ops.Add()
        self.mlp_add = ops.Add()

    def construct(
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
        kept=None,
        of_tokens=None,
    ):
        if self.has_kernel and x.shape[0] <= MAX_KERNEL_ROWS:
            cos, sin = (bias, bias) if angles is None else angles
            cache = self.attention.cache.operands()
            x = self.kernel(x, bias, slots, cos, sin, *cache, *self.operands(), self.plan)
            return x if tokens is None else (x, losses)
        if kept is None or not self.drops_tokens:
            return self.whole(x, bias, angles, slots, dropout_keys, tokens, shares, losses, groups, of_tokens)
        part, bias, angles, dropout_keys = self.token_drop(x, kept, dropout_keys)
        return self.token_drop.joined(self.whole(part, bias, angles, None, dropout_keys), x, kept)

    def attend(self, queries, x, bias, angles, slots, dropout_keys, losses, of_tokens):
        """Attention of the queries' input (N, D) to x (N, D), and the sum of the losses so far."""
        if of_tokens is None or not self.attention.has_losses:
            return self.attention(queries, x, bias, angles, slots, dropout_keys), losses
        y, own = self.attention(queries, x, bias, angles, slots, dropout_keys, of_tokens)
        return y, own if losses is None else self.attention_losses_add(losses, own)

    def feed_forward(self, x, dropout_keys, tokens, shares, losses, groups):
        """The MLP or the experts on (N, D), and the sum of the losses so far."""
        if not self.has_experts:
            return self.mlp(x, dropout_keys), losses
        y, own = self.mlp(x, tokens, shares, dropout_keys, groups)
        if own is None or losses is None:
            return y, own if losses is None else losses
        return y, self.losses_add(losses, own)


class DecoderLayer(Block):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type, layer: int):
        super().__init__(config, specs, dtype, layer)
        self.mlp_norm = build_norm(config, specs.within("mlp_norm"), dtype)

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
        a = self.attention_norm(x)
        a, losses = self.attend(a, a, bias, angles, slots, dropout_keys, losses, of_tokens)
        x = self.attention_add(x, a)
        y, losses = self.feed_forward(self.mlp_norm(x), dropout_keys, tokens, shares, losses, groups)
        x = self.mlp_add(x, y)
        return x if tokens is None else (x, losses)

    def operands(self):
        """Parameters in the order of use, for a kernel."""
        attention = self.attention_norm.operands() + self.attention.operands()
        return attention + self.mlp_norm.operands() + self.mlp.operands()


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)), on one norm. Source: arXiv:2204.02311 section 2."""

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
        a = self.attention_norm(x)
        y, losses = self.feed_forward(a, dropout_keys, tokens, shares, losses, groups)
        a, losses = self.attend(a, a, bias, angles, slots, dropout_keys, losses, of_tokens)
        x = self.attention_add(x, self.mlp_add(a, y))
        return x if tokens is None else (x, losses)

    def operands(self):
        return self.attention_norm.operands() + self.attention.operands() + self.mlp.operands()


class SandwichLayer(Block):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). Source: arXiv:2504.07866 section 2.2."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type, layer: int):
        super().__init__(config, specs, dtype, layer)
        self.attention_output_norm = build_norm(config, specs.within("attention_output_norm"), dtype)
        self.mlp_norm = build_norm(config, specs.within("mlp_norm"), dtype)
        self.mlp_output_norm = build_norm(config, specs.within("mlp_output_norm"), dtype)

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
        a = self.attention_norm(x)
        a, losses = self.attend(a, a, bias, angles, slots, dropout_keys, losses, of_tokens)
        x = self.attention_add(x, self.attention_output_norm(a))
        y, losses = self.feed_forward(self.mlp_norm(x), dropout_keys, tokens, shares, losses, groups)
        x = self.mlp_add(x, self.mlp_output_norm(y))
        return x if tokens is None else (x, losses)

    def operands(self):
        attention = self.attention_norm.operands() + self.attention.operands() + self.attention_output_norm.operands()
        return attention + self.mlp_norm.operands() + self.mlp.operands() + self.mlp_output_norm.operands()


BLOCKS = {"sequential": DecoderLayer, "parallel": ParallelBlock, "sandwich": SandwichLayer}
