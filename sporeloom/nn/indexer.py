# SPDX-License-Identifier: Apache-2.0
"""Sparse attention's choice of tokens (DSA). Source: DeepSeek-V3.2-Exp; openPangu 2.0's modelling file for transformers."""

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.cache import KeyCache
from sporeloom.nn.linear import Linear
from sporeloom.nn.norm import RMSNorm
from sporeloom.nn.rotary import Rotary

EXCLUDED = -10000.0
"""Added to the attention scores of tokens that were not chosen, as a mask adds it."""
FAR = 10000.0
"""Factor of a mask before it is added to the scores that tokens are chosen by."""


class Indexer(nn.Cell):
    """Mask of the `top_k` visible tokens with the highest sum over heads of weight * relu(q k^T). No gradient passes."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__()
        latent, indexer = config.latent, config.indexer
        assert latent is not None and indexer is not None
        self.heads, self.width, self.top_k, self.rope = (
            indexer.num_heads,
            indexer.head_dim,
            indexer.top_k,
            latent.rope_dim,
        )
        self.num_sinks, self.join_sinks, self.empty = latent.num_sinks, ops.Concat(-1), ops.ZerosLike()
        self.is_cached, self.dtype = False, dtype
        self.query, self.key = Linear(specs.within("query"), dtype), Linear(specs.within("key"), dtype)
        self.key_norm = RMSNorm(specs.within("key_norm"), indexer.norm_epsilon, dtype)
        self.weights = Linear(specs.within("weights"), dtype)
        self.query_rotary, self.key_rotary = Rotary(config, dtype), Rotary(config, dtype)
        self.query_rotary.adjacent = self.key_rotary.adjacent = False
        self.reshape, self.cut, self.join, self.transpose = (
            ops.Reshape(),
            ops.StridedSlice(),
            ops.Concat(-1),
            ops.Transpose(),
        )
        self.scores, self.scale, self.relu = ops.BatchMatMul(transpose_b=True), ops.Mul(), ops.ReLU()
        self.by_head, self.weigh, self.add_up, self.cast = ops.Transpose(), ops.Mul(), ops.ReduceSum(), ops.Cast()
        self.hide, self.far, self.top, self.least = ops.Add(), ops.Mul(), ops.TopK(), ops.ReduceMin(keep_dims=True)
        self.is_less, self.exclude, self.combine, self.expand = ops.Less(), ops.Mul(), ops.Add(), ops.ExpandDims()

    def attach_cache(self, num_rows: int, capacity: int) -> None:
        """Keep the keys of `capacity` tokens for each of `num_rows` rows."""
        self.cache, self.is_cached = KeyCache((num_rows, 1, capacity, self.width), self.dtype), True

    def construct(self, x, query_latent, bias, angles, slots=None):
        """x: (B*T, D); query_latent: (B*T, Q); bias: (B, 1, T, M + S), whose first M are sinks'. Returns such a bias."""
        batch, _, length, places = bias.shape
        keys = places - self.num_sinks
        if keys <= self.top_k:
            return bias
        q = self.reshape(self.query(query_latent), (batch, length, self.heads, self.width))
        k = self.reshape(self.key_norm(self.key(x)), (batch, length, 1, self.width))
        q, k = self.rotated(self.query_rotary, q, angles), self.rotated(self.key_rotary, k, angles)
        q = self.reshape(self.transpose(q, (0, 2, 1, 3)), (batch, 1, self.heads * length, self.width))
        k = self.reshape(k, (batch, 1, length, self.width))
        scores = self.relu(self.scores(q, self.cache(k, slots) if self.is_cached else k))
        scores = self.cast(self.reshape(scores, (batch, self.heads, length, keys)), mstype.float32)
        weights = self.reshape(self.cast(self.weights(x), mstype.float32), (batch, length, self.heads, 1))
        weights = self.by_head(weights, (0, 2, 1, 3))  # (B, H, T, 1)
        scores = self.add_up(self.weigh(scores, self.scale(weights, (self.heads * self.width) ** -0.5)), 1)  # (B, T, T)
        hidden = self.cut(bias, (0, 0, 0, self.num_sinks), (batch, 1, length, places), (1, 1, 1, 1))
        scores = ops.stop_gradient(self.hide(self.expand(scores, 1), self.far(hidden, FAR)))
        last = self.least(self.top(scores, self.top_k)[0], -1)  # (B, 1, T, 1)
        left_out = self.exclude(self.cast(self.is_less(scores, last), mstype.float32), EXCLUDED)
        if self.num_sinks:
            sinks = self.cut(bias, (0, 0, 0, 0), (batch, 1, length, self.num_sinks), (1, 1, 1, 1))
            left_out = self.join_sinks((self.empty(sinks), left_out))
        return self.combine(bias, left_out)

    def rotated(self, rotary, x, angles):
        """The first features of each head rotated."""
        batch, length, heads, width = x.shape
        first = self.cut(x, (0, 0, 0, 0), (batch, length, heads, self.rope), (1, 1, 1, 1))
        first = rotary(first, angles[0], angles[1])
        if width == self.rope:
            return first
        return self.join((first, self.cut(x, (0, 0, 0, self.rope), (batch, length, heads, width), (1, 1, 1, 1))))
