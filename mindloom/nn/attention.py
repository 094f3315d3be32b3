# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention within documents, causal."""

import math

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindloom.model_config import DecoderConfig
from mindloom.nn.cache import NoCache
from mindloom.nn.dropout import AttentionDropout, Dropout
from mindloom.nn.linear import Linear

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


class Attention(nn.Cell):
    """Softmax(Q K^T / sqrt(head_dim) + mask) V, then the output projection.

    Keys and values go through `cache`, which may add those of earlier tokens.
    """

    def __init__(self, config: DecoderConfig, dtype: mstype.Type):
        super().__init__()
        d = config.hidden_size
        self.num_heads, self.head_dim, self.hidden_size, self.dtype = config.num_heads, config.head_dim, d, dtype
        self.query = Linear(d, d, config.qkv_init_std, dtype)
        self.key = Linear(d, d, config.qkv_init_std, dtype)
        self.value = Linear(d, d, config.qkv_init_std, dtype)
        self.output = Linear(d, d, 0.02 / math.sqrt(2 * config.num_layers), dtype)
        self.reshape, self.transpose, self.merge_transpose = ops.Reshape(), ops.Transpose(), ops.Transpose()
        self.scores, self.context = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
        self.scale, self.mask_add, self.softmax = ops.Mul(), ops.Add(), ops.Softmax(-1)
        self.cast = ops.Cast()
        self.cache = NoCache()
        self.probs_dropout, self.dropout = AttentionDropout(config.dropout_rate), Dropout(config.dropout_rate)

    def construct(self, query_input, x, bias, slots=None, dropout_keys=None):
        """query_input, x: (B*T, D), where queries and where keys and values come from; bias: (B, 1, T, keys)."""
        batch, _, length, _ = bias.shape
        q = self.split_heads(self.query(query_input), batch, length)
        k = self.split_heads(self.key(x), batch, length)
        v = self.split_heads(self.value(x), batch, length)
        k, v = self.cache(k, v, slots)  # (B, H, T, D/H) -> (B, H, keys, D/H)
        scores = self.cast(self.scores(q, k), mstype.float32)  # (B, H, T, keys)
        scores = self.mask_add(self.scale(scores, 1.0 / math.sqrt(self.head_dim)), bias)
        probs = self.probs_dropout(self.softmax(scores), dropout_keys)
        y = self.context(self.cast(probs, self.dtype), v)  # (B, H, T, D/H)
        y = self.reshape(self.merge_transpose(y, (0, 2, 1, 3)), (-1, self.hidden_size))  # -> (B*T, D)
        return self.dropout(self.output(y), dropout_keys)

    def split_heads(self, x, batch, length):
        x = self.reshape(x, (batch, length, self.num_heads, self.head_dim))  # (B*T, D) -> (B, T, H, D/H)
        return self.transpose(x, (0, 2, 1, 3))  # -> (B, H, T, D/H)
