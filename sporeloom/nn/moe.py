# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in place of an MLP: router, dispatch, experts, combine.

Shapes: N rows (B*T), D hidden; tokens are counted in G groups of L neighbours (N = G*L); E experts, each with capacity
for C tokens of a group; k choices of a token. Groups come from the configuration, so what is dropped is the same on
every mesh.
Where nothing is dropped, rows are sorted by expert instead (`sporeloom.nn.dropless`).
Padding does not count as tokens: it takes no capacity, and no loss or count includes it (`is_token` (G, L), 1 or 0).

Source: arXiv:2101.03961 (Switch: capacity, load-balancing loss), arXiv:2006.16668 (GShard: all first choices before all
second ones), arXiv:2202.08906 (router z-loss), arXiv:2505.21411 (MoGE: grouped router), arXiv:2303.10845 (hash router).
"""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.cells import CountingCell, ExpertCell
from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.dispatch import AssignedExperts, CombineWeights, DispatchIndices
from sporeloom.nn.dropless import (
    GroupedProduct,
    OfRows,
    OwnChoices,
    RowsOfTokens,
    SortedRows,
    SumsOfTokens,
    WithoutOthersRows,
    has_fast_product,
)
from sporeloom.nn.dropout import Dropout
from sporeloom.nn.linear import MAX_KERNEL_ROWS
from sporeloom.nn.mlp import ACTIVATIONS, build_mlp
from sporeloom.nn.parameter import declared_parameter
from sporeloom.nn.router_losses import LoadCounter, RouterLosses
from sporeloom.nn.routing import HashRouter, Router, TopKRouter


@ops.constexpr
def _ones(rows, columns):
    return Tensor(np.ones((rows, columns), np.float32))


@ops.constexpr
def _numbers_alike(count, number):
    return Tensor(np.full(count, number, np.float32))


class ExpertLinear(nn.Cell):
    """y = x W^T + b for each expert, with W (E, out, in) and b (E, 1, out): rows (E, R, in) -> (E, R, out); or sorted rows
    (R, in) -> (R, out), with the number of each expert's, (E,), the expert of each, (R,), and whether that is of another
    rank."""

    def __init__(self, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__()
        self.weight = declared_parameter(specs["weight"])
        self.matmul, self.cast, self.dtype = ops.BatchMatMul(transpose_b=True), ops.Cast(), dtype
        self.grouped = GroupedProduct()
        self.has_bias = "bias" in specs
        if self.has_bias:
            self.bias = declared_parameter(specs["bias"])
            self.bias_add, self.of_rows, self.row_bias_add = ops.Add(), OfRows(), ops.Add()
            self.own = WithoutOthersRows()

    def construct(self, x, counts=None, experts=None, away=None):
        if counts is not None:
            y = self.grouped(x, self.cast(self.weight, self.dtype), counts)
            if self.has_bias:
                bias = self.of_rows(self.bias, experts, self.dtype)
                y = self.row_bias_add(y, bias)
                if away is not None:  # rows of others have no part in the gradient of the bias
                    y = self.own(y, away)
            return y
        y = self.matmul(x, self.cast(self.weight, self.dtype))
        if self.has_bias:
            y = self.bias_add(y, self.cast(self.bias, self.dtype))
        return y

    def operands(self):
        """Inputs of a kernel."""
        return (self.weight, self.bias) if self.has_bias else (self.weight,)


class ExpertMLPs(nn.Cell):
    """The MLP of each expert on its own rows, (E, R, D) -> (E, R, D), or sorted ones (see `ExpertLinear`)."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__()
        self.up = ExpertLinear(specs.within("up"), dtype)
        self.is_gated = config.gated_mlp
        if self.is_gated:
            self.gate = ExpertLinear(specs.within("gate"), dtype)
            self.gate_mul = ops.Mul()
        self.activation = ACTIVATIONS[config.activation]()
        self.down = ExpertLinear(specs.within("down"), dtype)
        self.own_input, self.own_output = WithoutOthersRows(), WithoutOthersRows()

    def construct(self, x, counts=None, experts=None, away=None):
        of_rows = () if counts is None else (counts, experts, away)
        if away is not None:
            x = self.own_input(x, away)
        y = self.activation(self.gate(x, *of_rows) if self.is_gated else self.up(x, *of_rows))
        if self.is_gated:
            y = self.gate_mul(y, self.up(x, *of_rows))
        y = self.down(y, *of_rows)
        return y if away is None or self.down.has_bias else self.own_output(y, away)

    def operands(self):
        """Parameters in the order of use, for a kernel."""
        gate = self.gate.operands() if self.is_gated else ()
        return self.up.operands() + gate + self.down.operands()


class MoE(nn.Cell, CountingCell, ExpertCell):
    """Each token's k experts, weighted, and the shared one: (N, D) -> (N, D).

    With `shares`, where a model learns from plain text, also the losses of the router, (1,) (see `RouterLosses`), and while
    training experts take no more than their capacity. Nowhere else is anything dropped: what a token gets depends on no other
    then, so that a policy, its reference, what samples from it and what scores it later are one function. `groups`: what
    `TokenGroups` gives; without it there is no padding.
    """

    has_kernel = False
    """Whether few tokens go through a compiled kernel of the experts, each of which computes the rows that chose it
    (`sporeloom.inference.kernels`)."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type, layer: int):
        super().__init__()
        experts = config.mixture
        self.config, self.settings, self.dtype, self.hidden_size = config, experts, dtype, config.hidden_size
        self.chosen = experts.experts_per_token
        self.is_hashed, self.has_shared = experts.router == "hash", experts.shared_ffn_hidden_size > 0
        self.input = ops.Identity()
        if self.is_hashed:
            self.hash = HashRouter(config, layer)
        else:
            self.router = Router(config, specs.within("router"))
            self.choices = TopKRouter(config, specs.within("choices"))
            self.losses, self.weights = RouterLosses(config), CombineWeights(config, specs.within("weights"))
        self.assigned, self.places = AssignedExperts(config), DispatchIndices(config)
        self.expand_tokens, self.each_choice, self.in_order = ops.ExpandDims(), ops.Mul(), ops.Reshape()
        self.by_group, self.probs_by_group = ops.Reshape(), ops.Reshape()
        self.dispatch, self.split = ops.Gather(1), ops.Reshape()
        self.to_experts, self.rows = ops.Transpose(), ops.Reshape()
        self.experts = ExpertMLPs(config, specs.within("experts"), dtype)
        self.unrows, self.from_experts, self.merge = ops.Reshape(), ops.Transpose(), ops.Reshape()
        self.own = OwnChoices(experts.num_experts, self.chosen, experts.router == "grouped")
        self.order = SortedRows(experts.num_experts)
        self.by_expert, self.by_token = RowsOfTokens(), SumsOfTokens()
        self.token_choices, self.split_weights, self.token_weights = ops.Reshape(), ops.Reshape(), ops.Transpose()
        self.unsplit_weights, self.rows_of_tokens = ops.Reshape(), ops.Reshape()
        self.row_weights = ops.Reshape()
        self.weight_to_dtype, self.sums = ops.Cast(), ops.Identity()
        self.first_place, self.clip, self.slot = ops.Mul(), ops.Minimum(), ops.Add()
        self.collect, self.to_weight, self.expand = ops.Gather(1), ops.Cast(), ops.ExpandDims()
        self.to_dtype, self.weigh, self.by_choice, self.add_up = ops.Cast(), ops.Mul(), ops.Reshape(), ops.ReduceSum()
        self.output = ops.Reshape()
        if self.has_shared:
            self.shared = build_mlp(config, specs.within("shared"), dtype)
            self.shared.dropout = Dropout(0.0)  # of the sum there is one
            self.shared_add = ops.Add()
        self.dropout = Dropout(config.dropout_rate)
        self.counter, self.counts, self.counts_add = LoadCounter(config), False, ops.Add()
        self.balance_rate = experts.balance_bias_rate

    def attach_counter(self, name: str) -> Parameter:
        """Let training steps count, see `LoadCounter`. Returns the parameter of that name, whose gradient is the
        count."""
        self.counts = True
        return self.counter.attach(name)

    def construct(self, x, tokens, shares=None, dropout_keys=None, groups=None):
        count, length = tokens.shape
        group = self.settings.capacity_group or length
        if shares is not None or (group < length and length % group == 0):  # rules for cp shard groups
            count, length = x.shape[0] // group, group
        capacity, limit, is_token, is_choice, num_tokens = length, None, None, None, None
        if shares is not None:
            is_token, num_tokens = _ones(count, length), _numbers_alike(count, length)
            if groups is not None:
                is_token, num_tokens, limit = groups
            is_choice = self.of_choices(is_token, count, length)
            capacity = self.settings.capacity(length) if self.training else length
            limit = limit if self.training else None
        a, losses, probs, logits = self.input(x), None, None, None
        if self.is_hashed:
            choices = self.hash(tokens, count, length)
        else:
            probs, logits = self.router(a)
            probs = self.probs_by_group(probs, (count, length, self.settings.num_experts))  # (N, E) -> (G, L, E)
            choices = self.choices(ops.stop_gradient(probs))  # (G, L, k)
        chosen, of_all, one_hot = self.assigned(choices, is_choice)
        place, owners = None, None
        is_compiled = self.has_kernel and count * length <= MAX_KERNEL_ROWS
        is_sorted = capacity >= length and self.sorts(count * length)
        if is_compiled or is_sorted:
            kept = _ones(count, self.chosen * length) if is_choice is None else is_choice
        else:
            place, kept, owners = self.places(chosen, one_hot, capacity, is_choice, limit)
            kept = self.to_weight(kept, mstype.float32)
        weights = kept if self.is_hashed else self.weights(probs, one_hot, kept)
        if shares is not None and not self.is_hashed:
            losses = self.losses(probs, logits, one_hot, shares, is_token, num_tokens)
        if self.counts and shares is not None:
            counted = self.counter(one_hot, kept, probs, is_choice, is_token)
            losses = counted if losses is None else self.counts_add(losses, counted)
        if is_compiled:
            y = self.kernel(a, chosen, *self.experts.operands(), self.plan)
            y = self.combine(y, weights, (count, length))
        elif is_sorted:
            y = self.through_sorted(a, choices, weights, of_all)
        else:
            y = self.through_slots(a, chosen, place, owners, (count, length, capacity))
            y = self.combine(y, weights, (count, length))
        if self.has_shared:
            y = self.shared_add(y, self.shared(a, dropout_keys))
        return self.dropout(y, dropout_keys), losses

    def of_choices(self, is_token, groups, length):
        """The same of each choice: (G, L) -> (G, k*L)."""
        is_choice = self.each_choice(self.expand_tokens(is_token, 1), _ones(self.chosen, 1))  # (G, k, L)
        return self.in_order(is_choice, (groups, self.chosen * length))

    def split_experts(self, parts):
        """Let each of so many parts of the experts compute the rows of its own."""
        share = self.own.split_experts(parts)
        for _, cell in self.experts.cells_and_names():
            if isinstance(cell, GroupedProduct):
                cell.of_share(share)

    def sorts(self, num_tokens):
        """Whether there is a product of groups that is faster for so many tokens."""
        return self.sorts_rows and has_fast_product(self.experts.up.grouped.operator_on_cpu, num_tokens)

    def through_sorted(self, x, choices, weights, one_hot):
        """Sums of the results of each row's choices, weighted, (N, D) -> (N, D): each expert computes its own rows."""
        groups, length, chosen = choices.shape
        choices = self.token_choices(choices, (groups * length, chosen))  # (G, L, k) -> (N, k)
        weights = self.token_weights(self.split_weights(weights, (groups, chosen, length)), (0, 2, 1))  # (G, L, k)
        weights = self.unsplit_weights(weights, (groups * length, chosen))
        keys, experts, weights = self.own(choices, weights)  # (P, N, m)
        order, tokens, experts, away, rows, counts = self.order(keys, experts, one_hot)
        places = self.rows_of_tokens(rows, keys.shape)
        y = self.experts(self.by_expert(x, tokens, places), counts, experts, away)  # (R, D)
        weights = self.weight_to_dtype(self.row_weights(weights, (-1,)), self.dtype)
        return self.sums(self.by_token(y, weights, order, tokens, places))

    def through_slots(self, x, chosen, place, owners, sizes):
        """Results of the choices of rows (N, D), (G, k*L, D): each expert computes `capacity` rows of each group."""
        groups, length, capacity = sizes
        experts, d = self.settings.num_experts, self.hidden_size
        y = self.dispatch(self.by_group(x, (groups, length, d)), owners, 1)  # (G, E*C, D)
        y = self.to_experts(self.split(y, (groups, experts, capacity, d)), (1, 0, 2, 3))  # (E, G, C, D)
        y = self.experts(self.rows(y, (experts, groups * capacity, d)))  # (E, G*C, D)
        y = self.from_experts(self.unrows(y, (experts, groups, capacity, d)), (1, 0, 2, 3))  # (G, E, C, D)
        slot = self.slot(self.first_place(chosen, capacity), self.clip(place, capacity - 1))  # (G, k*L)
        return self.collect(self.merge(y, (groups, experts * capacity, d)), slot, 1)  # (G, k*L, D)

    def combine(self, y, weights, sizes):
        """Add up the results of each token's choices, weighted: (G, k*L, D) -> (N, D)."""
        groups, length = sizes
        d = self.hidden_size
        y = self.weigh(y, self.expand(self.to_dtype(weights, self.dtype), 2))
        y = self.add_up(self.by_choice(y, (groups, self.chosen, length, d)), 1)  # (G, k, L, D) -> (G, L, D)
        return self.output(y, (-1, d))  # (N, D)
