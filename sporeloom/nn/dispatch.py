# SPDX-License-Identifier: Apache-2.0
"""Indices by which rows go to places of experts, and weights with which results are combined.

Shapes: see `sporeloom.nn.moe`.
"""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.parameter import declared_parameter
from sporeloom.nn.router_losses import TINY


@ops.constexpr
def _zeros(length):
    return Tensor(np.zeros(length, np.float32))


@ops.constexpr
def _tokens(chosen, length):
    """(k*L,): the token of each choice."""
    return Tensor(np.tile(np.arange(length, dtype=np.int32), chosen))


class AssignedExperts(nn.Cell):
    """Experts of the choices (G, L, k) in their order, first choices of all tokens before second ones, (G, k*L); as one-hot
    (G, k*L, E); and the same with 0 where a choice is that of padding (`is_choice` (G, k*L) is 0)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.experts, self.chosen = config.mixture.num_experts, config.mixture.experts_per_token
        self.by_choice, self.in_order, self.one_hot = ops.Transpose(), ops.Reshape(), ops.OneHot(axis=-1)
        self.each, self.leave_out = ops.ExpandDims(), ops.Mul()
        self.on, self.off = Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)

    def construct(self, choices, is_choice=None):
        groups, length, _ = choices.shape
        chosen = self.by_choice(choices, (0, 2, 1))  # (G, L, k) -> (G, k, L)
        chosen = self.in_order(chosen, (groups, self.chosen * length))  # (G, k*L)
        of_all = self.one_hot(chosen, self.experts, self.on, self.off)  # (G, k*L, E)
        return chosen, of_all, of_all if is_choice is None else self.leave_out(of_all, self.each(is_choice, 2))


class DispatchIndices(nn.Cell):
    """Slot of each choice at its expert, and the choice in each slot.

        a group of L = 3 tokens, k = 2 choices of each, E = 3 experts, capacity C = 2

        choices        (L, k)      a: 0 2    b: 0 1    c: 0 1
        in their order (k*L,)      a0 b0 c0  a2 b1 c1             first choices of all tokens, then second ones
        place          (k*L,)      0  1  2   0  0  1              number of earlier choices of the same expert
        kept           (k*L,)      1  1  0   1  1  1              place < C: c's first choice is dropped
        slot           (k*L,)      0  1  2   6  3  4              expert * (C + 1) + place, at most place C
        tokens         (E, C + 1)  a b c | b c . | a . .          written at the slots; the last column is cut off
        owners         (E*C,)      a b b c a .                    the row that each expert computes at each place

    Takes what `AssignedExperts` gives.

    Returns:
        places, (G, k*L), counted also beyond the capacity; whether choices are kept, (G, k*L); owners, (G, E*C), any token
        where there is none.

    `is_choice` (G, k*L): 0 where a choice is that of padding, whose one-hot is 0 and which is never kept. `limit` (G, 1):
    how many are kept of a group, where that is fewer than the capacity that shapes have.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.experts, self.chosen = config.mixture.num_experts, config.mixture.experts_per_token
        self.running = ops.CumSum()
        self.before, self.own, self.own_sum = ops.Sub(), ops.Mul(), ops.ReduceSum()
        self.to_place, self.is_kept, self.clip = ops.Cast(), ops.Less(), ops.Minimum()
        self.first_place, self.slot = ops.Mul(), ops.Add()
        self.count, self.forget, self.expand, self.shape_places = ops.ReduceSum(), ops.Mul(), ops.Reshape(), ops.Add()
        self.to_index, self.flat, self.write = ops.Cast(), ops.Reshape(), ops.TensorScatterElements(axis=1)
        self.owners, self.share, self.cut, self.join = ops.Mul(), ops.Add(), ops.StridedSlice(), ops.Reshape()
        self.is_within, self.is_padding, self.times_capacity, self.put_last = (
            ops.Less(),
            ops.Sub(),
            ops.Mul(),
            ops.Add(),
        )

    def construct(self, chosen, one_hot, capacity, is_choice=None, limit=None):
        groups, length = chosen.shape[0], chosen.shape[1] // self.chosen
        places = capacity + 1  # the last one of each expert takes what is dropped

        # Place: how many choices before this one are of the same expert.
        before = self.before(self.running(one_hot, 1), 1.0)  # (G, k*L, E)
        place = self.own_sum(self.own(before, one_hot), 2)  # (G, k*L)
        if is_choice is not None:  # padding, whose place would be the first one
            place = self.put_last(place, self.times_capacity(self.is_padding(1.0, is_choice), capacity))
        place = self.to_place(place, mstype.int32)
        kept = self.is_kept(place, capacity) if limit is None else self.is_within(place, limit)

        # Owners: each choice writes its token at its slot.
        slot = self.slot(self.first_place(chosen, places), self.clip(place, capacity))  # (G, k*L)
        empty = self.expand(self.forget(self.count(one_hot, 1), 0.0), (groups, self.experts, 1))  # (G, E, 1)
        empty = self.to_index(self.shape_places(empty, _zeros(places)), mstype.int32)  # (G, E, C + 1)
        tokens = self.share(self.owners(chosen, 0), _tokens(self.chosen, length))  # (G, k*L)
        owners = self.write(self.flat(empty, (groups, self.experts * places)), slot, tokens)  # (G, E * (C + 1))
        owners = self.expand(owners, (groups, self.experts, places))
        owners = self.cut(owners, (0, 0, 0), (groups, self.experts, capacity), (1, 1, 1))  # (G, E, C)
        return place, kept, self.join(owners, (groups, self.experts * capacity))


class CombineWeights(nn.Cell):
    """Combine weight of each choice, 0 if it is dropped: probabilities (G, L, E), one-hot (G, k*L, E), kept (G,
    k*L); (G, k*L)."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs):
        super().__init__()
        experts = config.mixture
        self.chosen, self.normalize = experts.experts_per_token, experts.normalize
        self.factor = experts.routed_scaling_factor
        self.has_scale = "scale" in specs
        if self.has_scale:
            self.scale = declared_parameter(specs["scale"])
            self.scale_mul, self.scale_sum, self.scaled = ops.Mul(), ops.ReduceSum(), ops.Mul()
        self.by_choice, self.expand = ops.Reshape(), ops.ExpandDims()
        self.pick, self.pick_sum = ops.Mul(), ops.ReduceSum()
        self.drop, self.of_token, self.sum = ops.Mul(), ops.Reshape(), ops.ReduceSum(keep_dims=True)
        self.not_zero, self.divide, self.in_order, self.multiply = ops.Add(), ops.Div(), ops.Reshape(), ops.Mul()

    def construct(self, probs, one_hot, kept):
        groups, length, experts = probs.shape
        by_choice = self.by_choice(one_hot, (groups, self.chosen, length, experts))  # (G, k*L, E) -> (G, k, L, E)
        weights = self.pick_sum(self.pick(by_choice, self.expand(probs, 1)), 3)  # (G, k, L)
        kept = self.of_token(kept, (groups, self.chosen, length))  # (G, k*L) -> (G, k, L)
        if self.normalize == "after_drop":
            weights = self.drop(weights, kept)
        if self.normalize != "none":
            weights = self.divide(weights, self.not_zero(self.sum(weights, 1), TINY))
        if self.normalize != "after_drop":
            weights = self.drop(weights, kept)
        weights = self.in_order(weights, (groups, self.chosen * length))  # (G, k*L)
        if self.has_scale:
            weights = self.scaled(weights, self.scale_sum(self.scale_mul(one_hot, self.scale), 2))
        return weights if self.factor == 1.0 else self.multiply(weights, self.factor)
