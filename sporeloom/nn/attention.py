# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention within documents, causal."""

import math

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.cells import ClippedAttention, FlashCell
from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.cache import Int8KVCache, KVCache, NoCache
from sporeloom.nn.dropout import AttentionDropout, Dropout
from sporeloom.nn.flash import GroupedFlashAttention, chooses_flash, runs_flash
from sporeloom.nn.linear import Linear
from sporeloom.nn.max_logits import MaxLogits
from sporeloom.nn.rotary import Rotary

MASKED_SCORE = -10000.0  # the reference implementation's finite value: a row that may attend to nothing stays finite


@ops.constexpr
def _places(count):
    """(N,): the positions in a sequence, or the slots of a cache."""
    return Tensor(np.arange(count, dtype=np.int32))


@ops.constexpr
def _column(count):
    """(N, 1): the same."""
    return Tensor(np.arange(count, dtype=np.int32)[:, None])


@ops.constexpr
def _sinks(count):
    """(N,): positions of sinks, before those of all tokens."""
    return Tensor(np.arange(-count, 0, dtype=np.int32))


class Mask(nn.Cell, FlashCell):
    """Additive attention bias, 0 where a token may attend and -10000 elsewhere; for FlashAttention 0 and 1.

    Args:
        num_sinks: keys in front of all tokens' that every token attends to.
    """

    def __init__(self, flash=False, num_sinks=0):
        super().__init__()
        self.num_sinks = num_sinks
        if num_sinks:
            self.sees_sink, self.join_sinks = ops.GreaterEqual(), ops.Concat(-1)
        self.expand_positions, self.expand_bias = ops.ExpandDims(), ops.ExpandDims()
        self.cast, self.hidden, self.scale = ops.Cast(), ops.Sub(), ops.Mul()
        self.has_flash, self.negate = flash, ops.LogicalNot()

    def construct(self, positions):  # (B, T) -> (B, 1, T, keys)
        positions = self.expand_positions(positions, -1)
        visible = self.visible(positions)
        if self.num_sinks:
            visible = self.join_sinks((self.sees_sink(positions, _sinks(self.num_sinks)), visible))
        return self.bias(visible)

    def bias(self, visible):  # (B, T, keys) -> (B, 1, T, keys)
        if self.has_flash and runs_flash(self.flash_on_cpu):
            return self.expand_bias(self.cast(self.negate(visible), mstype.uint8), 1)
        return self.expand_bias(self.scale(self.hidden(1.0, self.cast(visible, mstype.float32)), MASKED_SCORE), 1)


class DocumentMask(Mask):
    """Mask of full sequences: a token attends to its document up to itself.

    A token at index i with position p (counted from its document's start) sees the keys i-p .. i, so the positions
    alone say where documents begin. Nothing of the size (T, T) is a constant: graphs of long sequences would hold it.
    """

    def __init__(self, flash=False, num_sinks=0):
        super().__init__(flash, num_sinks)
        self.first, self.last = ops.Sub(), ops.Add()
        self.not_before, self.not_after, self.both = ops.LessEqual(), ops.LessEqual(), ops.LogicalAnd()

    def visible(self, positions):  # (B, T, 1) -> (B, T, T)
        length = positions.shape[1]
        first = self.first(_column(length), positions)
        last = self.last(first, positions)  # i, but no constant that MindSpore would compute with
        return self.both(self.not_before(first, _places(length)), self.not_after(_places(length), last))


class WindowMask(DocumentMask):
    """Mask of full sequences with a sliding window: a token attends to so many of its document up to itself."""

    def __init__(self, window: int, num_sinks: int = 0, flash: bool = False):
        super().__init__(flash, num_sinks)
        self.window, self.nearest = window, ops.Maximum()

    def visible(self, positions):  # (B, T, 1) -> (B, T, T)
        length = positions.shape[1]
        first = self.first(_column(length), positions)
        last = self.last(first, positions)
        first = self.nearest(first, self.first(last, self.window - 1))
        return self.both(self.not_before(first, _places(length)), self.not_after(_places(length), last))


class SlotMask(Mask):
    """Mask of tokens whose keys are in the slots of a cache, slot i those of position i: a token attends to the
    slots up to its own, with a window to so many of them."""

    def __init__(self, capacity, num_sinks=0, window=0):
        super().__init__(False, num_sinks)
        self.capacity, self.window = capacity, window
        self.not_after = ops.LessEqual()
        if window:
            self.before, self.not_before, self.both = ops.Sub(), ops.Less(), ops.LogicalAnd()

    def visible(self, positions):  # (B, T, 1) -> (B, T, S)
        visible = self.not_after(_places(self.capacity), positions)
        if not self.window:
            return visible
        return self.both(visible, self.not_before(self.before(positions, self.window), _places(self.capacity)))


class Attention(nn.Cell, FlashCell, ClippedAttention):
    """Softmax(Q K^T / sqrt(head_dim) + mask) V, then the output projection.

    Keys and values go through `cache`, which may add those of earlier tokens. KV heads of keys and values serve H heads of
    queries, H / KV each: the queries of such a group are rows of one product (B, KV, H/KV*T, D/H).
    """

    has_kernel = False
    """Whether single queries over a cache are computed by a compiled kernel, which writes to the cache, too
    (`sporeloom.inference.kernels`)."""
    has_losses = False
    """Whether it returns losses in training."""
    trains_indexer = False
    """It has no indexer."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.kv_heads, config.head_size
        self.query_size, self.dtype = config.query_size, dtype
        self.query, self.key = Linear(specs.within("query"), dtype), Linear(specs.within("key"), dtype)
        self.value, self.output = Linear(specs.within("value"), dtype), Linear(specs.within("output"), dtype)
        self.has_rotary = config.position == "rotary"
        if self.has_rotary:
            self.query_rotary, self.key_rotary = Rotary(config, dtype), Rotary(config, dtype)
        self.group_size = config.num_heads // config.kv_heads
        if self.group_size > 1:
            self.key_input = ops.Identity()
            self.group_queries, self.ungroup_scores = ops.Reshape(), ops.Reshape()
            self.group_probs, self.ungroup_context = ops.Reshape(), ops.Reshape()
        self.reshape = ops.Reshape()
        self.query_transpose, self.key_transpose, self.value_transpose = (ops.Transpose() for _ in range(3))
        self.merge_transpose = ops.Transpose()
        self.scores, self.context = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
        self.scale, self.mask_add, self.softmax = ops.Mul(), ops.Add(), ops.Softmax(-1)
        self.cast = ops.Cast()
        self.cache = NoCache()
        self.has_flash = chooses_flash(config)
        if self.has_flash:
            self.flash = GroupedFlashAttention(config)
        self.probs_dropout, self.dropout = AttentionDropout(config.dropout_rate), Dropout(config.dropout_rate)

    def attach_cache(self, num_rows: int, capacity: int, is_int8: bool = False) -> None:
        """Keep keys and values of `capacity` tokens for each of `num_rows` rows."""
        self.has_flash = False  # a few queries at a time have few scores
        kind = Int8KVCache if is_int8 else KVCache
        self.cache = kind((num_rows, self.num_kv_heads, capacity, self.head_dim), self.dtype)

    def attach_max_logits(self) -> None:
        self.max_logits = MaxLogits(self.num_heads)
        self.has_losses = self.counts_max_logits = True

    def head_powers(self):
        of_key, of_query = (0.5,) * self.head_dim, (0.5 if self.group_size == 1 else 1.0,) * self.head_dim
        queries = [(each, of_query) for each in self.query.operands()]
        return queries + ([(each, of_key) for each in self.key.operands()] if self.group_size == 1 else [])

    def construct(self, query_input, x, bias, angles=None, slots=None, dropout_keys=None, of_tokens=None):
        """query_input, x: (B*T, D), inputs of queries, and of keys and values; bias: (B, 1, T, keys), from `Mask`;
        angles: of RoPE, for models that have it. With `of_tokens` (see `sporeloom.nn.blocks`) its losses, (1,), where it
        has any, are returned as well."""
        losses = None
        batch, _, length, _ = bias.shape
        of_queries = (batch, length, self.num_heads, self.head_dim)
        of_keys = (batch, length, self.num_kv_heads, self.head_dim)
        q = self.reshape(self.query(query_input, dropout_keys), of_queries)  # (B*T, H*D/H) -> (B, T, H, D/H)
        if self.group_size > 1:
            x = self.key_input(x)
        k = self.reshape(self.key(x, dropout_keys), of_keys)
        v = self.reshape(self.value(x, dropout_keys), of_keys)
        if self.has_rotary:
            cos, sin = angles
            q, k = self.query_rotary(q, cos, sin), self.key_rotary(k, cos, sin)
        q, k = self.query_transpose(q, (0, 2, 1, 3)), self.key_transpose(k, (0, 2, 1, 3))  # -> (B, H, T, D/H)
        v = self.value_transpose(v, (0, 2, 1, 3))
        if self.has_kernel and length == 1:
            y = self.kernel(q, k, v, *self.cache.operands(), slots, bias)
        else:
            k, v = self.cache(k, v, slots)  # (B, KV, T, D/H) -> (B, KV, keys, D/H)
            if self.has_flash and runs_flash(self.flash_on_cpu):
                y = self.flash(q, k, v, bias)
            else:
                logits = self.logits(q, k, bias)
                if self.has_losses and of_tokens is not None:
                    losses = self.max_logits(logits, of_tokens[1])
                y = self.attend(logits, v, dropout_keys)
        y = self.reshape(self.merge_transpose(y, (0, 2, 1, 3)), (-1, self.query_size))  # (B, H, T, D/H) -> (B*T, D)
        y = self.dropout(self.output(y, dropout_keys), dropout_keys)
        return y if losses is None else (y, losses)

    def operands(self):
        return self.query.operands() + self.key.operands() + self.value.operands() + self.output.operands()

    def logits(self, q, k, bias):
        """Scaled and masked scores of q (B, H, T, D/H) and k (B, KV, keys, D/H), (B, H, T, keys) float32."""
        batch, _, length, num_keys = bias.shape
        rows = self.group_size * length
        if self.group_size > 1:
            q = self.group_queries(q, (batch, self.num_kv_heads, rows, self.head_dim))
        scores = self.scores(q, k)
        if self.group_size > 1:
            scores = self.ungroup_scores(scores, (batch, self.num_heads, length, num_keys))
        scores = self.cast(scores, mstype.float32)  # (B, H, T, keys)
        return self.mask_add(self.scale(scores, 1.0 / math.sqrt(self.head_dim)), bias)

    def attend(self, logits, v, dropout_keys):
        """(B, H, T, keys) and v (B, KV, keys, D/H) -> (B, H, T, D/H)."""
        batch, _, length, num_keys = logits.shape
        probs = self.cast(self.probs_dropout(self.softmax(logits), dropout_keys), self.dtype)
        if self.group_size > 1:
            probs = self.group_probs(probs, (batch, self.num_kv_heads, self.group_size * length, num_keys))
        y = self.context(probs, v)
        if self.group_size > 1:
            y = self.ungroup_context(y, (batch, self.num_heads, length, self.head_dim))
        return y
