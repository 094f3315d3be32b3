# SPDX-License-Identifier: Apache-2.0
"""Losses of a router, and counts of what it chose.

Shapes: see `sporeloom.nn.moe`.
"""

from mindspore import nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.nn.counter import Counter

TINY = 1e-9  # keeps a sum of weights from being 0
COUNTS_BESIDE_EXPERTS = 2
"""Values of a layer's `LoadCounter` after one for each expert: dropped choices, and the entropy of the
probabilities."""


class RouterLosses(nn.Cell):
    """Load-balancing loss and z-loss of a layer, (1,), times their coefficients and each group's fraction of the
    loss; None where the configuration has none.

    `shares` (G,): the part of the loss that the tokens of each group have; they add up to 1 over the global batch, so the
    losses of microbatches simply add up, as those of the tokens do. Means are over the tokens of a group, `counts` (G,).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts = config.mixture
        self.experts = experts.num_experts
        self.over_batch, self.first_only = experts.balance_over == "batch", experts.balance == "first"
        self.choices = 1 if self.first_only else experts.experts_per_token
        self.balance_factor, self.z_factor = experts.balance_loss, experts.router_z_loss
        self.first, self.each, self.keep = ops.StridedSlice(), ops.ExpandDims(), ops.Mul()
        self.given, self.likely = ops.ReduceSum(), ops.ReduceSum()
        self.both, self.balance, self.scale = ops.Mul(), ops.ReduceSum(), ops.Mul()
        self.at_least, self.square_count, self.divide = ops.Maximum(), ops.Square(), ops.Div()
        # (1,), for MindSpore can neither shard a Reshape of a number without dims nor send one between stages.
        self.both_batch, self.balance_batch, self.scale_batch = ops.Mul(), ops.ReduceSum(keep_dims=True), ops.Mul()
        self.count_batch, self.at_least_batch = ops.ReduceSum(keep_dims=True), ops.Maximum()
        self.square_batch, self.divide_batch = ops.Square(), ops.Div()
        self.weigh, self.total = ops.Mul(), ops.ReduceSum(keep_dims=True)
        self.max, self.shift, self.exp, self.sum = ops.ReduceMax(keep_dims=True), ops.Sub(), ops.Exp(), ops.ReduceSum()
        self.less_one, self.log = ops.Sub(), ops.Log1p()  # not Log: see TokenLosses
        self.log_sum, self.row, self.square = ops.Add(), ops.Reshape(), ops.Square()
        self.by_group, self.z_keep, self.z_sum, self.z_divide = ops.Reshape(), ops.Mul(), ops.ReduceSum(), ops.Div()
        self.z_at_least, self.z_weigh = ops.Maximum(), ops.Mul()
        self.z_total, self.z_scale, self.add = ops.ReduceSum(keep_dims=True), ops.Mul(), ops.Add()

    def construct(self, probs, logits, one_hot, shares, is_token, counts):
        """(G, L, E), (N, E), (G, k*L, E), (G,), (G, L), (G,) -> (1,)"""
        if self.balance_factor and self.z_factor:
            return self.add(
                self.balance_loss(probs, one_hot, shares, is_token, counts),
                self.z_loss(logits, shares, is_token, counts),
            )
        if self.balance_factor:
            return self.balance_loss(probs, one_hot, shares, is_token, counts)
        return self.z_loss(logits, shares, is_token, counts) if self.z_factor else None

    def balance_loss(self, probs, one_hot, shares, is_token, counts):
        groups, length, experts = probs.shape
        if self.first_only:
            one_hot = self.first(one_hot, (0, 0, 0), (groups, length, experts), (1, 1, 1))  # (G, k*L, E) -> (G, L, E)
        probs = self.keep(probs, self.each(is_token, 2))
        if self.over_batch:
            both = self.both_batch(self.given(one_hot, (0, 1)), self.likely(probs, (0, 1)))  # (E,)
            counts = self.square_batch(self.at_least_batch(self.count_batch(counts, 0), 1.0))
            balance = self.divide_batch(self.balance_batch(both, 0), counts)  # (1,)
            balance = self.scale_batch(balance, self.total(shares, 0))
        else:
            both = self.both(self.given(one_hot, 1), self.likely(probs, 1))  # (G, E)
            balance = self.divide(self.balance(both, 1), self.square_count(self.at_least(counts, 1.0)))  # (G,)
            balance = self.total(self.weigh(balance, shares), 0)  # (1,)
        return self.scale(balance, self.balance_factor * self.experts / self.choices)

    def z_loss(self, logits, shares, is_token, counts):
        largest = ops.stop_gradient(self.max(logits, 1))  # (N, E) -> (N, 1)
        log_sum = self.log(self.less_one(self.sum(self.exp(self.shift(logits, largest)), 1), 1.0))
        log_sum = self.log_sum(log_sum, self.row(largest, (-1,)))  # (N,)
        z = self.by_group(self.square(log_sum), is_token.shape)  # (G, L)
        z = self.z_sum(self.z_keep(z, is_token), 1)  # (G,)
        z = self.z_divide(z, self.z_at_least(counts, 1.0))
        return self.z_scale(self.z_total(self.z_weigh(z, shares), 0), self.z_factor)


class LoadCounter(Counter):
    """Counts the choices of each expert, including dropped ones, the dropped ones alone, and the entropy of each
    token's probabilities, summed, which is without meaning for a hash router: (E + 2,). Padding is in none of
    them."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.mixture.num_experts + COUNTS_BESIDE_EXPERTS)
        self.given, self.missed = ops.ReduceSum(), ops.Sub()
        self.of_group, self.dropped = ops.ReduceSum(), ops.ReduceSum(True)
        self.is_sum_one = config.mixture.router != "sigmoid"
        self.total, self.normalize = ops.ReduceSum(True), ops.Div()
        self.shift, self.inverse, self.less_one, self.log = ops.Add(), ops.Div(), ops.Sub(), ops.Log1p()
        self.each, self.keep = ops.ExpandDims(), ops.Mul()
        self.information, self.entropy_of_group, self.entropy = ops.Mul(), ops.ReduceSum(), ops.ReduceSum(True)
        self.join = ops.Concat(0)

    def construct(self, one_hot, kept, probs, is_choice, is_token):
        """(G, k*L, E), (G, k*L), (G, L, E) or None, (G, k*L), (G, L) -> (1,), 0"""
        dropped = self.dropped(self.of_group(self.missed(is_choice, kept), 1), 0)  # (1,)
        if probs is None:
            entropy = self.shift(dropped, 0.0)
        else:
            if not self.is_sum_one:
                probs = self.normalize(probs, self.total(probs, 2))
            inverse = self.inverse(1.0, self.shift(probs, TINY))
            information = self.information(probs, self.log(self.less_one(inverse, 1.0)))  # -p log p
            information = self.keep(information, self.each(is_token, 2))
            entropy = self.entropy(self.entropy_of_group(information, (1, 2)), 0)  # (1,)
        return self.carry(self.join((self.given(one_hot, (0, 1)), dropped, entropy)))
