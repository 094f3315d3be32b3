# SPDX-License-Identifier: Apache-2.0
"""Sparse attention's choice of tokens (DSA), and the loss that trains it.

B batch, T tokens, S keys, H heads, M sinks. Source: DeepSeek-V3.2-Exp (technical report, section 2.1); openPangu 2.0's
modelling file for transformers.
"""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.cells import CountingCell
from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.cache import KeyCache
from sporeloom.nn.counter import Counter
from sporeloom.nn.linear import Linear
from sporeloom.nn.norm import RMSNorm
from sporeloom.nn.rotary import Rotary

EXCLUDED = -10000.0
"""Added to the attention scores of tokens that were not chosen, as a mask adds it."""
FAR = 10000.0
"""Factor of a mask before it is added to the scores that tokens are chosen by."""
TINY = 1e-9
"""Added to a probability before its logarithm is taken."""
MIN_SUM = 1e-30
"""Smallest sum of probabilities that others are divided by: a token may attend to sinks alone."""


class Indexer(nn.Cell):
    """Mask of the `top_k` visible tokens with the highest sum over heads of weight * relu(q k^T).

    No gradient passes through the choice. The scores have one where `IndexerLoss` trains them.
    """

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

    def construct(self, x, query_latent, bias, angles, slots=None, dropout_keys=None):
        """x: (B*T, D); query_latent: (B*T, Q); bias: (B, 1, T, M + S), whose first M are sinks'. Returns such a bias."""
        if not self.chooses(bias):
            return bias
        scores = ops.stop_gradient(self.scores_of(x, query_latent, bias, angles, slots, dropout_keys))
        return self.with_sinks(bias, self.left_out(scores, self.of_tokens(bias)))

    def chooses(self, bias):
        """Whether there are more keys than are chosen."""
        return bias.shape[3] - self.num_sinks > self.top_k

    def scores_of(self, x, query_latent, bias, angles, slots=None, dropout_keys=None):
        """Scores of all keys, (B, 1, T, S) float32."""
        batch, _, length, places = bias.shape
        keys = places - self.num_sinks
        q = self.reshape(self.query(query_latent, dropout_keys), (batch, length, self.heads, self.width))
        k = self.reshape(self.key_norm(self.key(x, dropout_keys)), (batch, length, 1, self.width))
        q, k = self.rotated(self.query_rotary, q, angles), self.rotated(self.key_rotary, k, angles)
        q = self.reshape(self.transpose(q, (0, 2, 1, 3)), (batch, 1, self.heads * length, self.width))
        k = self.reshape(k, (batch, 1, length, self.width))
        scores = self.relu(self.scores(q, self.cache(k, slots) if self.is_cached else k))
        scores = self.cast(self.reshape(scores, (batch, self.heads, length, keys)), mstype.float32)
        weights = self.reshape(self.cast(self.weights(x, dropout_keys), mstype.float32), (batch, length, self.heads, 1))
        weights = self.by_head(weights, (0, 2, 1, 3))  # (B, H, T, 1)
        scores = self.add_up(self.weigh(scores, self.scale(weights, (self.heads * self.width) ** -0.5)), 1)  # (B, T, S)
        return self.expand(scores, 1)

    def of_tokens(self, bias):
        """The mask of tokens: (B, 1, T, M + S) -> (B, 1, T, S)."""
        batch, _, length, places = bias.shape
        return self.cut(bias, (0, 0, 0, self.num_sinks), (batch, 1, length, places), (1, 1, 1, 1))

    def left_out(self, scores, hidden):
        """Mask of the tokens that are not chosen, (B, 1, T, S), given what is hidden anyway."""
        scores = self.hide(scores, self.far(hidden, FAR))
        last = self.least(self.top(scores, self.top_k)[0], -1)  # (B, 1, T, 1)
        return self.exclude(self.cast(self.is_less(scores, last), mstype.float32), EXCLUDED)

    def with_sinks(self, bias, left_out):
        """The mask of sinks and tokens, (B, 1, T, M + S), with tokens left out."""
        if self.num_sinks:
            batch, _, length, _ = bias.shape
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


class IndexerLoss(nn.Cell, CountingCell):
    """KL divergence of the attention's distribution over tokens from the softmax of the indexer's scores.

    The distribution is the sum of the attention probabilities over heads, divided by its sum over the tokens that the loss
    is of: the chosen ones, or in the dense warm-up all visible ones. It has no gradient. Each token counts by its part of the
    loss of the global batch, so that padding and the ends of documents do not count, and losses of microbatches add up.
    """

    kind = "indexer"

    def __init__(self, config: ModelConfig):
        super().__init__()
        latent, indexer = config.latent, config.indexer
        assert latent is not None and indexer is not None
        self.coefficient, self.num_sinks = indexer.loss_coefficient, latent.num_sinks
        self.over_heads, self.cut = ops.ReduceSum(keep_dims=True), ops.StridedSlice()
        self.over_tokens, self.at_least, self.divide = ops.ReduceSum(keep_dims=True), ops.Maximum(), ops.Div()
        self.hide, self.largest, self.shift = ops.Add(), ops.ReduceMax(keep_dims=True), ops.Sub()
        self.exp, self.sum, self.less_one = ops.Exp(), ops.ReduceSum(keep_dims=True), ops.Sub()
        self.log, self.log_q = ops.Log1p(), ops.Sub()  # not Log: see TokenLosses
        self.more, self.inverse, self.inverse_less_one, self.log_inverse = ops.Add(), ops.Div(), ops.Sub(), ops.Log1p()
        self.surprise, self.weigh_tokens, self.divergence = ops.Add(), ops.Mul(), ops.ReduceSum()
        self.weigh, self.of_row, self.total, self.scale = ops.Mul(), ops.ReduceSum(), ops.ReduceSum(True), ops.Mul()
        self.counter, self.counts, self.add_count = Counter(1), False, ops.Add()

    def attach_counter(self, name: str) -> Parameter:
        """Let training steps count the divergence. Returns the parameter of that name, whose gradient it is."""
        self.counts = True
        return self.counter.attach(name)

    def construct(self, scores, hidden, probs, weights):
        """scores, hidden (a mask): (B, 1, T, S); probs: (B, H, T, M + S); weights: (B, T). Returns (1,)."""
        target = self.target(ops.stop_gradient(probs))
        scores = self.hide(scores, hidden)
        shifted = self.shift(scores, ops.stop_gradient(self.largest(scores, 3)))
        log_q = self.log_q(shifted, self.log(self.less_one(self.sum(self.exp(shifted), 3), 1.0)))
        minus_log_p = self.log_inverse(self.inverse_less_one(self.inverse(1.0, self.more(target, TINY)), 1.0))
        negative = self.divergence(self.weigh_tokens(target, self.surprise(minus_log_p, log_q)), (1, 3))  # (B, T)
        total = self.total(self.of_row(self.weigh(negative, weights), 1), 0)  # (1,)
        loss = self.scale(total, -self.coefficient)
        if self.counts:
            loss = self.add_count(loss, self.counter.carry(self.scale(total, -1.0)))
        return loss

    def target(self, probs):
        """The attention's distribution over tokens: (B, H, T, M + S) -> (B, 1, T, S)."""
        probs = self.over_heads(probs, 1)
        if self.num_sinks:
            batch, _, length, places = probs.shape
            probs = self.cut(probs, (0, 0, 0, self.num_sinks), (batch, 1, length, places), (1, 1, 1, 1))
        return self.divide(probs, self.at_least(self.over_tokens(probs, 3), MIN_SUM))
