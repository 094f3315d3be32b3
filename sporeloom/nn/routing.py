# SPDX-License-Identifier: Apache-2.0
"""Routers of a mixture of experts: the tokens that count, the probability of each expert, and the k experts of each token.

Shapes: see `sporeloom.nn.moe`.
"""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.cells import CountingCell
from sporeloom.models.config import NO_LABEL, ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.parameter import declared_parameter

OUT_OF_GROUP = 1e9
"""Subtracted from the probabilities of experts that groups exclude."""


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
        is_token = self.to_float(is_token, mstype.float32)  # (B, T)
        is_token = self.by_group(is_token, (-1, self.group or tokens.shape[1]))  # (G, L)
        num_tokens = self.count(is_token, 1)  # (G,)
        limit = self.to_int(num_tokens, mstype.int32)
        if self.has_capacity:
            limit = self.capacity_of(self.capacities, limit, 0)
        return is_token, num_tokens, self.column(limit, 1)  # (G, L), (G,), (G, 1)


class Router(nn.Cell):
    """Probability of each expert, (N, E) in float32, and the logits behind them."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs):
        super().__init__()
        self.weight = declared_parameter(specs["weight"])
        self.cast, self.matmul = ops.Cast(), ops.MatMul(transpose_b=True)
        self.activation = ops.Sigmoid() if config.mixture.router == "sigmoid" else ops.Softmax(-1)

    def construct(self, x):
        logits = self.matmul(self.cast(x, mstype.float32), self.weight)  # (N, D) -> (N, E)
        return self.activation(logits), logits


class TopKRouter(nn.Cell):
    """Choose k experts for each token: (G, L, E) -> (G, L, k) int32, the first choice first."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs):
        super().__init__()
        experts = config.mixture
        self.experts, self.chosen = experts.num_experts, experts.experts_per_token
        self.grouped = experts.router == "grouped"
        self.has_bias = "balance_bias" in specs
        if self.has_bias:
            settings = {"requires_grad": False, "parallel_optimizer": False}
            self.balance_bias = declared_parameter(specs["balance_bias"], **settings)
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
            return self.top(probs, self.chosen)[1]  # (G, L, k)
        size = self.experts // self.chosen
        probs = self.split(probs, (groups, length, self.chosen, size))  # a group of neighbours for each choice
        return self.shift(self.argmax(probs), _numbers(self.chosen, size))  # (G, L, k): number in the group -> expert

    def of_best_groups(self, probs):
        """Probabilities far below all others outside of the groups whose two best experts add up to most. Source:
        DeepSeek-V3."""
        count, length, experts = probs.shape
        by_group = self.by_group(
            probs, (count, length, self.groups, experts // self.groups)
        )  # (G, L, groups, E/groups)
        scores = self.group_score(self.best_two(by_group, 2)[0], 3)  # (G, L, groups)
        best = self.best_groups(scores, self.kept_groups)[1]  # (G, L, kept groups)
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


def freeze_balance_biases(model: nn.Cell, of_frozen: bool = False) -> None:
    """Let training steps leave the biases of a model's routers as they are. `of_frozen`: of those alone whose matrix is not
    trained."""
    for _, cell in model.cells_and_names():
        moves = isinstance(cell, CountingCell) and cell.balance_rate
        if moves and not (of_frozen and cell.router.weight.requires_grad):
            cell.balance_rate = 0.0
