# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in place of an MLP: router, dispatch, experts, combine.

Shapes: N rows (B*T), D hidden; tokens are counted in G groups of L neighbours (N = G*L); E experts, each with room for C
tokens of a group; k choices of a token. Groups come from the configuration, so what is dropped is the same on every mesh.
Padding does not count as tokens: it takes no capacity, and no loss or count includes it (`is_token` (G, L), 1 or 0).

Source: arXiv:2101.03961 (Switch: capacity, load-balancing loss), arXiv:2006.16668 (GShard: all first choices before all
second ones), arXiv:2202.08906 (router z-loss), arXiv:2505.21411 (MoGE: grouped router), arXiv:2303.10845 (hash router).
"""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import Normal, initializer

from sporeloom.models.config import NO_LABEL, ModelConfig
from sporeloom.nn.counter import Counter
from sporeloom.nn.dropout import Dropout
from sporeloom.nn.mlp import ACTIVATIONS, MLP, GatedMLP

TINY = 1e-9  # keeps a sum of weights from being 0
OUT_OF_GROUP = 1e9
"""Subtracted from the probabilities of experts that groups exclude."""
COUNTS_BESIDE_EXPERTS = 2
"""Values of a layer's `LoadCounter` after one for each expert: dropped choices, and the entropy of the
probabilities."""


@ops.constexpr
def _numbers(stop, step):
    """(stop,): 0, step, 2 step, ..."""
    return Tensor(np.arange(stop, dtype=np.int32) * step)


class TokenGroups(nn.Cell):
    """Groups of a batch's tokens: labels, tokens (B, T) -> (G, L), 1, or 0 where there is padding; how many a
    group has, (G,); and how many of these an expert takes, (G, 1).

    Padding is what has no label, and the token that the tokenizer pads with. What an expert takes follows from the tokens
    there are, so that the same texts in longer rows lose the same ones.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts = config.mixture
        self.group, self.vocab_size, self.pad_id = experts.capacity_group, config.vocab_size, config.pad_id
        self.has_domains, self.has_capacity = config.num_domains > 1, experts.capacity_factor is not None
        longest = max(self.group or 0, config.seq_len)
        self.capacities = Tensor(np.array([experts.capacity(n) for n in range(longest + 1)], np.int32))
        self.has_label, self.token_of, self.is_text, self.both = (
            ops.NotEqual(),
            ops.FloorMod(),
            ops.NotEqual(),
            ops.LogicalAnd(),
        )
        self.to_float, self.by_group, self.count, self.to_int = ops.Cast(), ops.Reshape(), ops.ReduceSum(), ops.Cast()
        self.capacity_of, self.column = ops.Gather(), ops.ExpandDims()

    def construct(self, labels, tokens):
        is_token = self.has_label(labels, NO_LABEL)
        if self.pad_id is not None:
            tokens = self.token_of(tokens, self.vocab_size) if self.has_domains else tokens
            is_token = self.both(is_token, self.is_text(tokens, self.pad_id))
        is_token = self.by_group(self.to_float(is_token, mstype.float32), (-1, self.group or tokens.shape[1]))
        num_tokens = self.count(is_token, 1)
        limit = self.to_int(num_tokens, mstype.int32)
        if self.has_capacity:
            limit = self.capacity_of(self.capacities, limit, 0)
        return is_token, num_tokens, self.column(limit, 1)


class Router(nn.Cell):
    """Probability of each expert, (N, E) in float32, and the logits behind them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        shape = (config.mixture.num_experts, config.hidden_size)
        self.weight = Parameter(initializer(Normal(config.init_std), shape, mstype.float32))
        self.cast, self.matmul = ops.Cast(), ops.MatMul(transpose_b=True)
        self.activation = ops.Sigmoid() if config.mixture.router == "sigmoid" else ops.Softmax(-1)

    def construct(self, x):
        logits = self.matmul(self.cast(x, mstype.float32), self.weight)
        return self.activation(logits), logits


class TopKRouter(nn.Cell):
    """Choose k experts for each token: (G, L, E) -> (G, L, k) int32, the first choice first."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts = config.mixture
        self.experts, self.chosen = experts.num_experts, experts.experts_per_token
        self.grouped = experts.router == "grouped"
        self.has_bias = experts.has_bias
        if self.has_bias:
            zeros = initializer("zeros", (experts.num_experts,), mstype.float32)
            self.balance_bias = Parameter(zeros, requires_grad=False, parallel_optimizer=False)
            self.add_bias = ops.Add()
        self.groups, self.kept_groups = experts.num_groups, experts.groups_per_token
        if self.groups > self.kept_groups:
            self.by_group, self.best_two, self.group_score = ops.Reshape(), ops.TopK(), ops.ReduceSum()
            self.best_groups, self.one_hot, self.any_of = ops.TopK(), ops.OneHot(), ops.ReduceSum()
            self.each, self.less_one, self.far, self.exclude = ops.ExpandDims(), ops.Sub(), ops.Mul(), ops.Add()
            self.on, self.off = Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)
        if self.grouped:
            self.split, self.argmax, self.shift = ops.Reshape(), ops.Argmax(-1, mstype.int32), ops.Add()
        else:
            self.top = ops.TopK()

    def construct(self, probs):
        groups, length, _ = probs.shape
        if self.has_bias:
            probs = self.add_bias(probs, self.balance_bias)
        if self.groups > self.kept_groups:
            probs = self.of_best_groups(probs)
        if not self.grouped:
            return self.top(probs, self.chosen)[1]
        size = self.experts // self.chosen
        best = self.argmax(self.split(probs, (groups, length, self.chosen, size)))
        return self.shift(best, _numbers(self.chosen, size))

    def of_best_groups(self, probs):
        """Probabilities far below all others outside of the groups whose two best experts add up to most. Source:
        DeepSeek-V3."""
        count, length, experts = probs.shape
        by_group = self.by_group(probs, (count, length, self.groups, experts // self.groups))
        scores = self.group_score(self.best_two(by_group, 2)[0], 3)  # (G, L, groups)
        best = self.best_groups(scores, self.kept_groups)[1]
        kept = self.any_of(self.one_hot(best, self.groups, self.on, self.off), 2)  # (G, L, groups)
        away = self.far(self.less_one(kept, 1.0), OUT_OF_GROUP)  # 0, or less than any probability with its bias
        return self.by_group(self.exclude(by_group, self.each(away, 3)), (count, length, experts))


class HashRouter(nn.Cell):
    """A fixed random expert for each token id, in the group of experts of the token's domain.

    Ids from vocab_size on are of other domains: vocab_size further on, the same token of the next domain, and after the last
    one comes the first. Source: arXiv:2303.10845 section 3.3, arXiv:2106.04426.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        experts, draw = config.mixture, np.random.default_rng(np.random.SeedSequence([config.mixture.hash_seed, layer]))
        size = experts.num_experts // experts.num_domains
        groups = [draw.permutation(config.vocab_size) % size + size * d for d in range(experts.num_domains)]
        table = np.concatenate(groups[experts.domain :] + groups[: experts.domain])
        self.table = Tensor(table.astype(np.int32))  # as many ids for each expert of a group
        self.gather, self.reshape = ops.Gather(), ops.Reshape()

    def construct(self, tokens, groups, length):  # (B, T) -> (G, L, 1)
        return self.reshape(self.gather(self.table, tokens, 0), (groups, length, 1))


class DispatchIndices(nn.Cell):
    """Slot of each choice at its expert, and the choice in each slot.

    (G, L, k) -> choices in their order (G, k*L), all first ones before all second ones; their experts as one-hot
    (G, k*L, E); places (G, k*L), counted also beyond the capacity; whether they are within it; and the token at each place
    of each expert (G, E*C), any token where there is none.

    `is_choice` (G, k*L): 0 where a choice is that of padding, whose one-hot is 0 and which is never kept. `limit` (G, 1):
    how many are kept of a group, where that is fewer than the capacity that shapes have.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.experts, self.chosen = config.mixture.num_experts, config.mixture.experts_per_token
        self.by_choice, self.in_order = ops.Transpose(), ops.Reshape()
        self.one_hot, self.running = ops.OneHot(axis=-1), ops.CumSum()
        self.before, self.own, self.own_sum = ops.Sub(), ops.Mul(), ops.ReduceSum()
        self.to_place, self.is_kept, self.clip = ops.Cast(), ops.Less(), ops.Minimum()
        self.first_place, self.slot = ops.Mul(), ops.Add()
        self.count, self.forget, self.expand, self.shape_places = ops.ReduceSum(), ops.Mul(), ops.Reshape(), ops.Add()
        self.to_index, self.flat, self.write = ops.Cast(), ops.Reshape(), ops.TensorScatterElements(axis=1)
        self.owners, self.share, self.cut, self.join = ops.Mul(), ops.Add(), ops.StridedSlice(), ops.Reshape()
        self.each, self.leave_out, self.is_within = ops.ExpandDims(), ops.Mul(), ops.Less()
        self.is_padding, self.times_capacity, self.put_last = ops.Sub(), ops.Mul(), ops.Add()
        self.on, self.off = Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)

    def construct(self, choices, capacity, is_choice=None, limit=None):
        groups, length, _ = choices.shape
        places = capacity + 1  # the last one of each expert takes what is dropped
        chosen = self.in_order(self.by_choice(choices, (0, 2, 1)), (groups, self.chosen * length))
        one_hot = self.one_hot(chosen, self.experts, self.on, self.off)
        if is_choice is not None:
            one_hot = self.leave_out(one_hot, self.each(is_choice, 2))
        before = self.before(self.running(one_hot, 1), 1.0)
        place = self.own_sum(self.own(before, one_hot), 2)
        if is_choice is not None:  # padding, whose slot would be the first one
            place = self.put_last(place, self.times_capacity(self.is_padding(1.0, is_choice), capacity))
        place = self.to_place(place, mstype.int32)  # (G, k*L)
        kept = self.is_kept(place, capacity) if limit is None else self.is_within(place, limit)
        slot = self.slot(self.first_place(chosen, places), self.clip(place, capacity))
        empty = self.expand(self.forget(self.count(one_hot, 1), 0.0), (groups, self.experts, 1))
        empty = self.to_index(self.shape_places(empty, _zeros(places)), mstype.int32)
        owners = self.share(self.owners(chosen, 0), _tokens(self.chosen, length))
        tokens = self.write(self.flat(empty, (groups, self.experts * places)), slot, owners)
        tokens = self.cut(
            self.expand(tokens, (groups, self.experts, places)), (0, 0, 0), (groups, self.experts, capacity), (1, 1, 1)
        )
        return chosen, one_hot, place, kept, self.join(tokens, (groups, self.experts * capacity))


@ops.constexpr
def _ones(rows, columns):
    return Tensor(np.ones((rows, columns), np.float32))


@ops.constexpr
def _numbers_alike(count, number):
    return Tensor(np.full(count, number, np.float32))


@ops.constexpr
def _zeros(length):
    return Tensor(np.zeros(length, np.float32))


@ops.constexpr
def _tokens(chosen, length):
    """(k*L,): the token of each choice."""
    return Tensor(np.tile(np.arange(length, dtype=np.int32), chosen))


class ExpertLinear(nn.Cell):
    """y = x W^T + b for each expert: (E, R, in) -> (E, R, out), with W (E, out, in) and b (E, 1, out)."""

    def __init__(self, config: ModelConfig, in_features: int, out_features: int, std: float, dtype: mstype.Type):
        super().__init__()
        experts = config.mixture.num_experts
        self.weight = Parameter(initializer(Normal(std), (experts, out_features, in_features), mstype.float32))
        self.matmul, self.cast, self.dtype = ops.BatchMatMul(transpose_b=True), ops.Cast(), dtype
        self.has_bias = config.mlp_bias
        if self.has_bias:
            self.bias = Parameter(initializer("zeros", (experts, 1, out_features), mstype.float32))
            self.bias_add = ops.Add()

    def construct(self, x):
        y = self.matmul(x, self.cast(self.weight, self.dtype))
        if self.has_bias:
            y = self.bias_add(y, self.cast(self.bias, self.dtype))
        return y


class ExpertMLPs(nn.Cell):
    """The MLP of each expert on its own rows, (E, R, D) -> (E, R, D)."""

    def __init__(self, config: ModelConfig, dtype: mstype.Type):
        super().__init__()
        d, ffn = config.hidden_size, config.expert_size
        self.up = ExpertLinear(config, d, ffn, config.init_std, dtype)
        self.is_gated = config.gated_mlp
        if self.is_gated:
            self.gate = ExpertLinear(config, d, ffn, config.init_std, dtype)
            self.gate_mul = ops.Mul()
        self.activation = ACTIVATIONS[config.activation]()
        self.down = ExpertLinear(config, ffn, d, config.output_std, dtype)

    def construct(self, x):
        y = self.activation(self.gate(x) if self.is_gated else self.up(x))
        if self.is_gated:
            y = self.gate_mul(y, self.up(x))
        return self.down(y)


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
            one_hot = self.first(one_hot, (0, 0, 0), (groups, length, experts), (1, 1, 1))
        probs = self.keep(probs, self.each(is_token, 2))
        if self.over_batch:
            both = self.both_batch(self.given(one_hot, (0, 1)), self.likely(probs, (0, 1)))  # (E,)
            counts = self.square_batch(self.at_least_batch(self.count_batch(counts, 0), 1.0))
            balance = self.divide_batch(self.balance_batch(both, 0), counts)
            balance = self.scale_batch(balance, self.total(shares, 0))
        else:
            both = self.both(self.given(one_hot, 1), self.likely(probs, 1))  # (G, E)
            balance = self.divide(self.balance(both, 1), self.square_count(self.at_least(counts, 1.0)))
            balance = self.total(self.weigh(balance, shares), 0)
        return self.scale(balance, self.balance_factor * self.experts / self.choices)

    def z_loss(self, logits, shares, is_token, counts):
        largest = ops.stop_gradient(self.max(logits, 1))
        log_sum = self.log(self.less_one(self.sum(self.exp(self.shift(logits, largest)), 1), 1.0))
        log_sum = self.log_sum(log_sum, self.row(largest, (-1,)))
        z = self.z_sum(self.z_keep(self.by_group(self.square(log_sum), is_token.shape), is_token), 1)
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
        dropped = self.dropped(self.of_group(self.missed(is_choice, kept), 1), 0)
        if probs is None:
            entropy = self.shift(dropped, 0.0)
        else:
            if not self.is_sum_one:
                probs = self.normalize(probs, self.total(probs, 2))
            inverse = self.inverse(1.0, self.shift(probs, TINY))
            information = self.information(probs, self.log(self.less_one(inverse, 1.0)))  # -p log p
            information = self.keep(information, self.each(is_token, 2))
            entropy = self.entropy(self.entropy_of_group(information, (1, 2)), 0)
        return self.carry(self.join((self.given(one_hot, (0, 1)), dropped, entropy)))


class MoE(nn.Cell):
    """Each token's k experts, weighted, and the shared one: (N, D) -> (N, D).

    With `shares`, where a model learns from plain text, also the losses of the router, (1,) (see `RouterLosses`), and while
    training experts take no more than their capacity. Nowhere else is anything dropped: what a token gets depends on no other
    then, so that a policy, its reference, what samples from it and what scores it later are one function. `groups`: what
    `TokenGroups` gives; without it there is no padding.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: mstype.Type):
        super().__init__()
        experts = config.mixture
        self.config, self.settings, self.dtype, self.hidden_size = config, experts, dtype, config.hidden_size
        self.chosen = experts.experts_per_token
        self.is_hashed, self.has_shared = experts.router == "hash", experts.shared_ffn_hidden_size > 0
        self.input = ops.Identity()
        if self.is_hashed:
            self.hash = HashRouter(config, layer)
        else:
            self.router, self.choices = Router(config), TopKRouter(config)
            self.losses, self.weights = RouterLosses(config), CombineWeights(config)
        self.places = DispatchIndices(config)
        self.expand_tokens, self.each_choice, self.in_order = ops.ExpandDims(), ops.Mul(), ops.Reshape()
        self.by_group, self.probs_by_group = ops.Reshape(), ops.Reshape()
        self.dispatch, self.split = ops.Gather(1), ops.Reshape()
        self.to_experts, self.rows = ops.Transpose(), ops.Reshape()
        self.experts = ExpertMLPs(config, dtype)
        self.unrows, self.from_experts, self.merge = ops.Reshape(), ops.Transpose(), ops.Reshape()
        self.first_place, self.clip, self.slot = ops.Mul(), ops.Minimum(), ops.Add()
        self.collect, self.to_weight, self.expand = ops.Gather(1), ops.Cast(), ops.ExpandDims()
        self.to_dtype, self.weigh, self.by_choice, self.add_up = ops.Cast(), ops.Mul(), ops.Reshape(), ops.ReduceSum()
        self.output = ops.Reshape()
        if self.has_shared:
            self.shared = (GatedMLP if config.gated_mlp else MLP)(config, dtype, experts.shared_ffn_hidden_size)
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
            probs = self.probs_by_group(probs, (count, length, self.settings.num_experts))
            choices = self.choices(ops.stop_gradient(probs))
        chosen, one_hot, place, kept, owners = self.places(choices, capacity, is_choice, limit)
        kept = self.to_weight(kept, mstype.float32)
        weights = kept if self.is_hashed else self.weights(probs, one_hot, kept)
        if shares is not None and not self.is_hashed:
            losses = self.losses(probs, logits, one_hot, shares, is_token, num_tokens)
        if self.counts and shares is not None:
            counted = self.counter(one_hot, kept, probs, is_choice, is_token)
            losses = counted if losses is None else self.counts_add(losses, counted)
        y = self.through_experts(a, weights, chosen, place, owners, (count, length, capacity))
        if self.has_shared:
            y = self.shared_add(y, self.shared(a, dropout_keys))
        return self.dropout(y, dropout_keys), losses

    def of_choices(self, is_token, groups, length):
        """The same of each choice: (G, L) -> (G, k*L)."""
        is_choice = self.each_choice(self.expand_tokens(is_token, 1), _ones(self.chosen, 1))  # (G, k, L)
        return self.in_order(is_choice, (groups, self.chosen * length))

    def through_experts(self, x, weights, chosen, place, owners, sizes):
        """Dispatch rows (N, D) to their experts and combine the results, weighted."""
        groups, length, capacity = sizes
        experts, d = self.settings.num_experts, self.hidden_size
        y = self.dispatch(self.by_group(x, (groups, length, d)), owners, 1)  # (G, E*C, D)
        y = self.to_experts(self.split(y, (groups, experts, capacity, d)), (1, 0, 2, 3))  # (E, G, C, D)
        y = self.experts(self.rows(y, (experts, groups * capacity, d)))
        y = self.from_experts(self.unrows(y, (experts, groups, capacity, d)), (1, 0, 2, 3))
        slot = self.slot(self.first_place(chosen, capacity), self.clip(place, capacity - 1))
        y = self.collect(self.merge(y, (groups, experts * capacity, d)), slot, 1)  # (G, k*L, D)
        y = self.weigh(y, self.expand(self.to_dtype(weights, self.dtype), 2))
        y = self.add_up(self.by_choice(y, (groups, self.chosen, length, d)), 1)
        return self.output(y, (-1, d))


class CombineWeights(nn.Cell):
    """Combine weight of each choice, 0 if it is dropped: probabilities (G, L, E), one-hot (G, k*L, E), kept (G,
    k*L); (G, k*L)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts = config.mixture
        self.chosen, self.normalize = experts.experts_per_token, experts.normalize
        self.factor = experts.routed_scaling_factor
        self.has_scale = experts.router_scale
        if self.has_scale:
            self.scale = Parameter(initializer("ones", (1, experts.num_experts), mstype.float32))
            self.scale_mul, self.scale_sum, self.scaled = ops.Mul(), ops.ReduceSum(), ops.Mul()
        self.by_choice, self.expand = ops.Reshape(), ops.ExpandDims()
        self.pick, self.pick_sum = ops.Mul(), ops.ReduceSum()
        self.drop, self.of_token, self.sum = ops.Mul(), ops.Reshape(), ops.ReduceSum(keep_dims=True)
        self.not_zero, self.divide, self.in_order, self.multiply = ops.Add(), ops.Div(), ops.Reshape(), ops.Mul()

    def construct(self, probs, one_hot, kept):
        groups, length, experts = probs.shape
        by_choice = self.by_choice(one_hot, (groups, self.chosen, length, experts))
        weights = self.pick_sum(self.pick(by_choice, self.expand(probs, 1)), 3)  # (G, k, L)
        kept = self.of_token(kept, (groups, self.chosen, length))
        if self.normalize == "after_drop":
            weights = self.drop(weights, kept)
        if self.normalize != "none":
            weights = self.divide(weights, self.not_zero(self.sum(weights, 1), TINY))
        if self.normalize != "after_drop":
            weights = self.drop(weights, kept)
        weights = self.in_order(weights, (groups, self.chosen * length))
        if self.has_scale:
            weights = self.scaled(weights, self.scale_sum(self.scale_mul(one_hot, self.scale), 2))
        return weights if self.factor == 1.0 else self.multiply(weights, self.factor)
