# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA). Source: arXiv:2405.04434 section 2.1; DeepSeek-V3.

B batch, T tokens, S keys, H heads, M sinks; R width of the latent; N and P features of a head without and with positions;
V of its values.
"""

import math

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.core.errors import ConfigError
from sporeloom.models.cells import ClippedAttention, FlashCell
from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.attention import MASKED_SCORE
from sporeloom.nn.cache import KVCache, NoCache
from sporeloom.nn.causal_conv import CausalConv
from sporeloom.nn.dropout import AttentionDropout, Dropout
from sporeloom.nn.flash import FlashAttention, chooses_flash, runs_flash
from sporeloom.nn.indexer import Indexer, IndexerLoss
from sporeloom.nn.int8 import Int8Linear
from sporeloom.nn.linear import Linear
from sporeloom.nn.max_logits import MaxLogits
from sporeloom.nn.norm import RMSNorm
from sporeloom.nn.parameter import declared_parameter
from sporeloom.nn.rotary import Rotary
from sporeloom.nn.routing import freeze_balance_biases


class LatentAttention(nn.Cell, FlashCell, ClippedAttention):
    """Softmax((Qn Kn^T + Qp kp^T) * scale + mask) V, then the output projection, where (Kn, V) = kv_up(norm(latent)).

    Without a cache keys and values of each head are computed, and each head gets its copy of the shared key, so that a head's
    scores are one product. With one, which holds latents and shared keys, each head's half of `kv_up` is absorbed: queries
    are taken into the latent's space, and so is what they attend to out of it.

    FlashAttention takes values as wide as keys. In the product of `kv_up` a head's keys precede its values: these are cut
    out with as many features of the keys before them as are missing, and what the probabilities make of those is cut off the
    result; its gradient is 0. Layers whose indexer is trained compute plain attention: its loss needs the probabilities.
    """

    num_kv_heads = 1
    """Heads of the cache."""
    has_kernel = False
    """There is no kernel of it."""
    is_dense = False
    """Whether tokens attend to all visible ones where the indexer is trained: its dense warm-up."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.num_heads, self.width, self.dtype = config.num_heads, latent.kv_width, dtype
        self.nope, self.rope, self.value_dim = latent.nope_dim, latent.rope_dim, latent.value_dim
        self.has_query_latent = latent.query_width is not None
        if self.has_query_latent:
            self.query_down = Linear(specs.within("query_down"), dtype)
            self.query_norm = RMSNorm(specs.within("query_norm"), latent.norm_epsilon, dtype)
            self.query_up = Linear(specs.within("query_up"), dtype)
        else:
            self.query = Linear(specs.within("query"), dtype)
        self.kv_down = Linear(specs.within("kv_down"), dtype)
        self.kv_norm = RMSNorm(specs.within("kv_norm"), latent.norm_epsilon, dtype)
        self.kv_up = Linear(specs.within("kv_up"), dtype)
        self.output = Linear(specs.within("output"), dtype)
        self.has_conv, self.num_sinks = latent.conv_width > 0, latent.num_sinks
        if self.has_conv:
            self.query_conv = CausalConv(specs.within("query_conv"), dtype)
            self.kv_conv = CausalConv(specs.within("kv_conv"), dtype)
            self.output_conv = CausalConv(specs.within("output_conv"), dtype)
        if self.num_sinks:
            self.sink_latents = declared_parameter(specs["sink_latents"])
            self.sink_keys = declared_parameter(specs["sink_keys"])
            self.first_key, self.nothing, self.sink_rows = ops.StridedSlice(), ops.ZerosLike(), ops.Add()
            self.shared_sinks, self.flat_sinks, self.sink_cast = ops.Add(), ops.Reshape(), ops.Cast()
            self.join_sinks, self.join_heads, self.join_shared = ops.Concat(2), ops.Concat(2), ops.Concat(2)
            self.first_token, self.each_sink = ops.StridedSlice(), ops.Tile()
        of_indexer = specs.within("indexer")
        self.has_indexer = bool(of_indexer)
        if self.has_indexer:
            self.indexer = Indexer(config, of_indexer, dtype)
        self.trains_indexer = self.has_losses = self.has_indexer and config.trains_indexer
        if self.trains_indexer:
            self.indexer_loss, self.also_left_out = IndexerLoss(config), ops.Add()
        scaling = config.rope_scaling
        self.factor = (scaling.of_latent_scores if scaling else 1.0) / math.sqrt(latent.head_size)
        self.query_rotary, self.key_rotary = Rotary(config, dtype), Rotary(config, dtype)
        self.reshape, self.cast, self.cut_latent, self.cut_head = (
            ops.Reshape(),
            ops.Cast(),
            ops.StridedSlice(),
            ops.StridedSlice(),
        )
        self.query_transpose, self.up_transpose, self.rope_transpose = (ops.Transpose() for _ in range(3))
        self.shared_transpose, self.merge_transpose = ops.Transpose(), ops.Transpose()
        self.join_query, self.join_key, self.each_head = ops.Concat(-1), ops.Concat(-1), ops.Tile()
        self.cut_key, self.cut_value, self.cut_context = (ops.StridedSlice() for _ in range(3))
        self.group_queries, self.ungroup_scores = ops.Reshape(), ops.Reshape()
        self.head_scores, self.head_context = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
        self.scores, self.context = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()  # of keys that heads share
        self.scores_add = ops.Add()
        self.scale, self.mask_add, self.softmax = ops.Mul(), ops.Add(), ops.Softmax(-1)
        self.build_flash(config)
        self.cache, self.is_cached = NoCache(), False
        self.probs_dropout, self.dropout = AttentionDropout(config.dropout_rate), Dropout(config.dropout_rate)

    def build_flash(self, config):
        """FlashAttention, and the masks of a model that has it."""
        self.hides = chooses_flash(config)
        self.has_flash = self.hides and not self.trains_indexer
        if self.has_flash:
            self.flash = FlashAttention(self.num_heads, self.factor)
        if self.hides and self.has_indexer:
            self.number, self.mask_scale = ops.Cast(), ops.Mul()
            self.is_hidden, self.mark = ops.Less(), ops.Cast()

    def attach_cache(self, num_rows: int, capacity: int) -> None:
        """Keep latents and shared keys of `capacity` tokens for each of `num_rows` rows.

        Raises:
            ConfigError: an adapter of `kv_up`, which cannot be absorbed.
        """
        if not isinstance(self.kv_up, Linear | Int8Linear) or self.kv_up.has_adapters:
            raise ConfigError(
                "an adapter of attention.kv_up is not decoded with a cache of latents; merge it into the weights, or "
                "decode without a cache"
            )
        self.cache, self.is_cached = KVCache((num_rows, 1, capacity, self.width), self.dtype, self.rope), True
        self.hides = self.has_flash = False
        self.is_quantized = str(self.kv_up.weight.dtype) == "Int8"
        self.up_cast, self.by_head, self.cut_up, self.dequantize = (
            ops.Cast(),
            ops.Reshape(),
            ops.StridedSlice(),
            ops.Mul(),
        )
        self.head_first, self.context_first, self.batch_first = (ops.Transpose() for _ in range(3))
        self.head_rows = ops.Reshape()
        self.absorb_key, self.absorb_value = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True)

    def attach_max_logits(self) -> None:
        self.max_logits, self.losses_add = MaxLogits(self.num_heads), ops.Add()
        self.has_losses = self.counts_max_logits = True

    def head_powers(self):
        query = self.query_up if self.has_query_latent else self.query
        of_query, of_key = (0.5,) * self.nope + (1.0,) * self.rope, (0.5,) * self.nope + (0.0,) * self.value_dim
        return [*((each, of_query) for each in query.operands()), *((each, of_key) for each in self.kv_up.operands())]

    def construct(self, query_input, x, bias, angles=None, slots=None, dropout_keys=None, of_tokens=None):
        """query_input, x: (B*T, D); bias: (B, 1, T, M + S), from `Mask`; angles: of RoPE, and what `CausalConv` needs.

        With `of_tokens` (see `sporeloom.nn.blocks`) the losses of attention, (1,), where it has any, are returned as well.
        """
        batch, _, length, _ = bias.shape
        q_nope, q_rope, query_latent = self.queries(query_input, angles, (batch, length), dropout_keys)
        index_scores, index_mask, losses = None, None, None
        hides = self.hides and runs_flash(self.flash_on_cpu)
        if hides and self.has_indexer:
            bias = self.mask_scale(self.number(bias, mstype.float32), MASKED_SCORE)
        if self.trains_indexer and of_tokens is not None:
            bias, index_scores, index_mask = self.choice(x, query_latent, bias, angles)
        elif self.has_indexer:
            bias = self.indexer(x, query_latent, bias, angles, slots, dropout_keys)
        latent, shared = self.latents(x, angles, (batch, length), dropout_keys)
        shared = self.shared_transpose(shared, (0, 2, 1, 3))  # (B, 1, T, P)
        if self.is_cached:
            latent, shared = self.cache(self.reshape(latent, (batch, 1, length, self.width)), shared, slots)
            if self.num_sinks:
                latent, shared = self.after_sinks(latent, shared)
            y = self.attend_latents(q_nope, q_rope, latent, shared, bias)
        else:
            q = self.query_transpose(self.join_query((q_nope, q_rope)), (0, 2, 1, 3))  # (B, H, T, N + P)
            both, shared = self.keys_and_values(latent, shared, (batch, length), dropout_keys)
            key = self.cut_key(both, (0, 0, 0, 0), (*both.shape[:3], self.nope), (1, 1, 1, 1))
            k = self.join_key((key, self.each_head(shared, (1, self.num_heads, 1, 1))))
            if hides and self.has_flash:
                y = self.fused(q, k, both, bias)
            else:
                v = self.cut_value(both, (0, 0, 0, self.nope), both.shape, (1, 1, 1, 1))
                logits = self.logits(self.head_scores(q, k), bias)
                probs = self.softmax(logits)
                if self.has_losses and of_tokens is not None:
                    losses = self.losses(logits, probs, index_scores, index_mask, of_tokens)
                y = self.head_context(self.dropped(probs, dropout_keys), v)  # (B, H, T, V)
        y = self.reshape(self.merge_transpose(y, (0, 2, 1, 3)), (-1, self.num_heads * self.value_dim))
        if self.has_conv:
            y = self.output_conv(y, angles[2:])
        y = self.dropout(self.output(y, dropout_keys), dropout_keys)
        return y if losses is None else (y, losses)

    def losses(self, logits, probs, index_scores, index_mask, of_tokens):
        """The loss of the indexer, with the largest logits attached."""
        weights, padding = of_tokens
        if not self.trains_indexer:
            return self.max_logits(logits, padding)
        loss = self.indexer_loss(index_scores, index_mask, probs, weights)
        return self.losses_add(loss, self.max_logits(logits, padding)) if self.counts_max_logits else loss

    def choice(self, x, query_latent, bias, angles):
        """The mask of attention, and scores and mask of the indexer's loss, whose gradient ends at the indexer's inputs."""
        scores = self.indexer.scores_of(ops.stop_gradient(x), ops.stop_gradient(query_latent), bias, angles)
        hidden = self.indexer.of_tokens(bias)
        if self.is_dense or not self.indexer.chooses(bias):
            return bias, scores, hidden
        left_out = self.indexer.left_out(ops.stop_gradient(scores), hidden)
        return self.indexer.with_sinks(bias, left_out), scores, self.also_left_out(hidden, left_out)

    def queries(self, x, angles, sizes, dropout_keys):
        """(B*T, D) -> (B, T, H, N), (B, T, H, P), rotated, and the latent of the queries, or None."""
        (batch, length), latent = sizes, None
        if self.has_query_latent:
            latent = self.query_down(x, dropout_keys)
            latent = self.query_norm(self.query_conv(latent, angles[2:]) if self.has_conv else latent)
            q = self.query_up(latent, dropout_keys)
        else:
            q = self.query(x, dropout_keys)
        q = self.reshape(q, (batch, length, self.num_heads, self.nope + self.rope))
        q_rope = self.query_rotary(self.features(q, self.nope, self.nope + self.rope), angles[0], angles[1])
        return self.features(q, 0, self.nope), q_rope, latent

    def latents(self, x, angles, sizes, dropout_keys):
        """(B*T, D) -> the normed latent (B*T, R), and the key that all heads share, (B, T, 1, P), rotated."""
        batch, length = sizes
        down = self.kv_down(x, dropout_keys)
        rows = down.shape[0]
        latent = self.cut_latent(down, (0, 0), (rows, self.width), (1, 1))
        latent = self.kv_norm(self.kv_conv(latent, angles[2:]) if self.has_conv else latent)
        shared = self.cut_latent(down, (0, self.width), (rows, self.width + self.rope), (1, 1))
        shared = self.reshape(shared, (batch, length, 1, self.rope))
        return latent, self.key_rotary(shared, angles[0], angles[1])

    def keys_and_values(self, latent, shared, sizes, dropout_keys):
        """(B*T, R), (B, 1, T, P) -> keys and values of each head, (B, H, M + T, N + V), and the shared keys of all."""
        both = self.of_heads(latent, sizes, dropout_keys)
        if not self.num_sinks:
            return both, shared
        sinks, shared = self.sinks(shared)
        sinks = self.of_heads(sinks, (sizes[0], self.num_sinks), self.of_sinks(dropout_keys))
        return self.join_heads((sinks, both)), shared

    def of_heads(self, latent, sizes, dropout_keys):
        """(B*T, R) -> (B, H, T, N + V)."""
        both = self.reshape(self.kv_up(latent, dropout_keys), (*sizes, self.num_heads, self.nope + self.value_dim))
        return self.up_transpose(both, (0, 2, 1, 3))

    def fused(self, q, k, both, bias):
        """Attention in one kernel: (B, H, T, N + P), (B, H, S, N + P), (B, H, S, N + V) -> (B, H, T, V)."""
        if self.has_indexer:
            bias = self.mark(self.is_hidden(bias, 0.0), mstype.uint8)
        start = self.value_dim - self.rope
        v = self.cut_value(both, (0, 0, 0, start), both.shape, (1, 1, 1, 1))  # (B, H, S, N + P)
        y = self.flash(q, k, v, bias)
        return self.cut_context(y, (0, 0, 0, self.nope - start), y.shape, (1, 1, 1, 1))

    def features(self, x, start, stop):
        batch, length, heads, _ = x.shape
        return self.cut_head(x, (0, 0, 0, start), (batch, length, heads, stop), (1, 1, 1, 1))

    def with_shared(self, q, shared):
        """Scores of queries (B, T, H, P) and keys (B, 1, S, P) that all heads share, (B, H, T, S)."""
        batch, length, heads, width = q.shape
        q = self.group_queries(self.rope_transpose(q, (0, 2, 1, 3)), (batch, 1, heads * length, width))
        return self.ungroup_scores(self.scores(q, shared), (batch, heads, length, shared.shape[2]))

    def logits(self, scores, bias):
        """Scaled and masked scores, (B, H, T, S) float32."""
        return self.mask_add(self.scale(self.cast(scores, mstype.float32), self.factor), bias)

    def dropped(self, probs, dropout_keys):
        """The probabilities after dropout, in the number type of the computation."""
        return self.cast(self.probs_dropout(probs, dropout_keys), self.dtype)

    def attend_latents(self, q_nope, q_rope, latent, shared, bias):
        """Attention in the latent's space: (B, T, H, N), (B, T, H, P), (B, 1, S, R), (B, 1, S, P) -> (B, H, T, V)."""
        batch, length, heads, _ = q_nope.shape
        up = self.up_cast(self.kv_up.weight, self.dtype)
        if self.is_quantized:
            up = self.dequantize(up, self.up_cast(self.reshape(self.kv_up.scale, (-1, 1)), self.dtype))
        up = self.by_head(up, (heads, self.nope + self.value_dim, self.width))
        key_up = self.cut_up(up, (0, 0, 0), (heads, self.nope, self.width), (1, 1, 1))
        value_up = self.cut_up(up, (0, self.nope, 0), (heads, self.nope + self.value_dim, self.width), (1, 1, 1))
        rows = (heads, batch * length, self.nope)
        q = self.absorb_key(self.head_rows(self.head_first(q_nope, (2, 0, 1, 3)), rows), key_up)  # (H, B*T, R)
        q = self.batch_first(self.head_rows(q, (heads, batch, length, self.width)), (1, 2, 0, 3))  # (B, T, H, R)
        scores = self.scores_add(self.with_shared(q, latent), self.with_shared(q_rope, shared))
        probs = self.dropped(self.softmax(self.logits(scores, bias)), None)
        probs = self.group_queries(probs, (batch, 1, heads * length, probs.shape[3]))
        y = self.ungroup_scores(self.context(probs, latent), (batch, heads, length, self.width))
        y = self.head_rows(self.context_first(y, (1, 0, 2, 3)), (heads, batch * length, self.width))
        y = self.head_rows(self.absorb_value(y, value_up), (heads, batch, length, self.value_dim))
        return self.batch_first(y, (1, 0, 2, 3))

    def sinks(self, shared):
        """Shared keys of tokens (B, 1, S, P) -> normed latents of each row's sinks, (B*M, R), and the shared keys of both,
        (B, 1, M + S, P)."""
        batch, num = shared.shape[0], self.num_sinks
        nothing = self.nothing(self.first_key(shared, (0, 0, 0, 0), (batch, 1, 1, 1), (1, 1, 1, 1)))
        latents = self.flat_sinks(self.sink_cast(self.sink_latents, self.dtype), (1, 1, num, self.width))
        latents = self.flat_sinks(self.sink_rows(latents, nothing), (batch * num, self.width))
        keys = self.flat_sinks(self.sink_cast(self.sink_keys, self.dtype), (1, 1, num, self.rope))
        return self.kv_norm(latents), self.join_shared((self.shared_sinks(keys, nothing), shared))

    def of_sinks(self, dropout_keys):
        """Dropout keys, or adapters, of each row's sinks: those of its first token, (B, T) -> (B, M)."""
        if dropout_keys is None:
            return None
        first = self.first_token(dropout_keys, (0, 0), (dropout_keys.shape[0], 1), (1, 1))
        return self.each_sink(first, (1, self.num_sinks))

    def after_sinks(self, latent, shared):
        """(B, 1, S, R), (B, 1, S, P) -> (B, 1, M + S, R), (B, 1, M + S, P)."""
        sinks, shared = self.sinks(shared)
        sinks = self.flat_sinks(sinks, (latent.shape[0], 1, self.num_sinks, self.width))
        return self.join_sinks((sinks, latent)), shared


def attach_dense_warmup(model: nn.Cell) -> None:
    """Let the layers of a model attend to all visible tokens while their indexers are trained, and nothing move the biases of
    its routers."""
    freeze_balance_biases(model)
    for _, cell in model.cells_and_names():
        if isinstance(cell, LatentAttention):
            cell.is_dense = True
