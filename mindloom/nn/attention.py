# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention within documents, causal."""

import math

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindloom.models.config import ModelConfig
from mindloom.nn.cache import NoCache
from mindloom.nn.dropout import AttentionDropout, Dropout
from mindloom.nn.linear import Linear
from mindloom.nn.rotary import Rotary

MASKED_SCORE = -10000.0  # the originals' finite value: a row that may attend to nothing stays finite


@ops.constexpr
def _distance(length):
    """(T, T): how far back the key lies; negative: ahead."""
    index = np.arange(length, dtype=np.int32)
    return Tensor(index[:, None] - index[None, :])


@ops.constexpr
def _causal(length):
    """(T, T): the key does not lie ahead."""
    return Tensor(np.tri(length, dtype=bool))


@ops.constexpr
def _slots(capacity):
    """(S,): the slots of a cache."""
    return Tensor(np.arange(capacity, dtype=np.int32))


class Mask(nn.Cell):
    """Additive attention bias, 0 where a token may look and -10000 elsewhere."""

    def __init__(self):
        super().__init__()
        self.expand_positions, self.expand_bias = ops.ExpandDims(), ops.ExpandDims()
        self.cast, self.hidden, self.scale = ops.Cast(), ops.Sub(), ops.Mul()

    def construct(self, positions):  # (B, T) -> (B, 1, T, keys)
        visible = self.cast(self.visible(self.expand_positions(positions, -1)), mstype.float32)
        return self.expand_bias(self.scale(self.hidden(1.0, visible), MASKED_SCORE), 1)


class DocumentMask(Mask):
    """For whole sequences: a token sees what came before it in its document.

    A token at index i with position p (counted from its document's start) sees the keys i-p .. i, so the positions
    alone say where documents begin.
    """

    def __init__(self):
        super().__init__()
        self.not_before, self.both = ops.LessEqual(), ops.LogicalAnd()

    def visible(self, positions):  # (B, T, 1) -> (B, T, T)
        length = positions.shape[1]
        return self.both(self.not_before(_distance(length), positions), _causal(length))


class SlotMask(Mask):
    """For tokens whose keys lie in the slots of a cache, slot i those of position i: a token sees the slots up to its own."""

    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity
        self.not_after = ops.LessEqual()

    def visible(self, positions):  # (B, T, 1) -> (B, T, S)
        return self.not_after(_slots(self.capacity), positions)


class Heads(nn.Cell):
    """Features by heads: (B*T, H*D/H) -> (B, H, T, D/H)."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.reshape, self.transpose = ops.Reshape(), ops.Transpose()

    def construct(self, x, batch, length):
        x = self.reshape(x, (batch, length, self.num_heads, self.head_dim))  # -> (B, T, H, D/H)
        return self.transpose(x, (0, 2, 1, 3))  # -> (B, H, T, D/H)


class Attention(nn.Cell):
    """Softmax(Q K^T / sqrt(head_dim) + mask) V, then the output projection.

    Keys and values go through `cache`, which may add those of earlier tokens. KV heads of keys and values serve H heads of
    queries, H / KV each: the queries of such a group are rows of one product (B, KV, H/KV*T, D/H).
    """

    def __init__(self, config: ModelConfig, dtype: mstype.Type):
        super().__init__()
        d, qkv_std, qkv_bias = config.hidden_size, config.qkv_init_std, config.qkv_bias
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.kv_heads, config.head_size
        self.query_size, self.dtype = config.query_size, dtype
        self.query = Linear(d, config.query_size, qkv_std, dtype, qkv_bias)
        self.key = Linear(d, config.kv_size, qkv_std, dtype, qkv_bias)
        self.value = Linear(d, config.kv_size, qkv_std, dtype, qkv_bias)
        self.output = Linear(config.query_size, d, config.output_std, dtype, config.output_bias)
        self.has_rotary = config.position == "rotary"
        if self.has_rotary:
            self.query_rotary, self.key_rotary = Rotary(config, dtype), Rotary(config, dtype)
        self.group_size = config.num_heads // config.kv_heads
        if self.group_size > 1:
            self.key_input = ops.Identity()
            self.group_queries, self.ungroup_scores = ops.Reshape(), ops.Reshape()
            self.group_probs, self.ungroup_context = ops.Reshape(), ops.Reshape()
        self.query_heads = Heads(config.num_heads, config.head_size)
        self.key_heads, self.value_heads = (Heads(config.kv_heads, config.head_size) for _ in range(2))
        self.reshape, self.merge_transpose = ops.Reshape(), ops.Transpose()
        self.scores, self.context = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
        self.scale, self.mask_add, self.softmax = ops.Mul(), ops.Add(), ops.Softmax(-1)
        self.cast = ops.Cast()
        self.cache = NoCache()
        self.probs_dropout, self.dropout = AttentionDropout(config.dropout_rate), Dropout(config.dropout_rate)

    def construct(self, query_input, x, bias, angles=None, slots=None, dropout_keys=None):
        """query_input, x: (B*T, D), where queries and where keys and values come from; bias: (B, 1, T, keys); angles: of
        RoPE, for models that have it."""
        batch, _, length, num_keys = bias.shape
        q = self.query_heads(self.query(query_input, dropout_keys), batch, length)
        if self.group_size > 1:
            x = self.key_input(x)
        k = self.key_heads(self.key(x, dropout_keys), batch, length)
        v = self.value_heads(self.value(x, dropout_keys), batch, length)
        if self.has_rotary:
            cos, sin = angles
            q, k = self.query_rotary(q, cos, sin), self.key_rotary(k, cos, sin)
        k, v = self.cache(k, v, slots)  # (B, KV, T, D/H) -> (B, KV, keys, D/H)
        rows = self.group_size * length
        if self.group_size > 1:
            q = self.group_queries(q, (batch, self.num_kv_heads, rows, self.head_dim))
        scores = self.scores(q, k)
        if self.group_size > 1:
            scores = self.ungroup_scores(scores, (batch, self.num_heads, length, num_keys))
        scores = self.cast(scores, mstype.float32)  # (B, H, T, keys)
        scores = self.mask_add(self.scale(scores, 1.0 / math.sqrt(self.head_dim)), bias)
        probs = self.cast(self.probs_dropout(self.softmax(scores), dropout_keys), self.dtype)
        if self.group_size > 1:
            probs = self.group_probs(probs, (batch, self.num_kv_heads, rows, num_keys))
        y = self.context(probs, v)
        if self.group_size > 1:
            y = self.ungroup_context(y, (batch, self.num_heads, length, self.head_dim))
        y = self.reshape(self.merge_transpose(y, (0, 2, 1, 3)), (-1, self.query_size))  # (B, H, T, D/H) -> (B*T, D)
        return self.dropout(self.output(y, dropout_keys), dropout_keys)
