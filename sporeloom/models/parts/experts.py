# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts and their routers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, choice_problems, number_problems
from sporeloom.models.parts import mlp
from sporeloom.models.parts.spec import MATRIX, ONES, ZEROS, ParameterSpec, Specs
from sporeloom.models.parts.work import Values, Work

if TYPE_CHECKING:
    from sporeloom.models.config import ModelConfig

STACKED = ".mlp.experts."
"""Part of the names of experts' parameters, stacked over the experts in dim 0."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Experts in place of a layer's MLP, and the router that assigns tokens to them. E experts, k of which process
    each token."""

    num_experts: Count
    """E."""
    experts_per_token: Count
    """k."""
    router: Literal["softmax", "grouped", "sigmoid", "hash"] = "softmax"
    """softmax: the k most probable. grouped: softmax over all, then the most probable of each of k groups of neighbours
    (MoGE). sigmoid: the k of highest sigmoid. hash: fixed by the token's id, nothing to train."""
    num_groups: Count = 1
    """Groups of neighbouring experts; a token's experts are in the `groups_per_token` groups whose two best experts have
    the highest sum of probabilities. For router: sigmoid or softmax."""
    groups_per_token: Count = 1
    normalize: Literal["none", "before_drop", "after_drop"] = "none"
    """Whether the combine weights of a token's experts are divided by their sum, and whether dropped choices are
    in it."""
    ffn_hidden_size: Count | None = None
    """Width of each expert; default: that of the model's MLP."""
    shared_ffn_hidden_size: Natural = 0
    """Width of the shared expert, which every token passes, unweighted; 0: there is none."""
    first_dense_layers: Natural = 0
    """Number of first layers that keep their MLP."""
    layer_frequency: Count = 1
    """Interval of the layers with experts among the others: 2 is layers 1, 3, 5, ... A top query layer never has
    experts."""
    router_scale: bool = False
    """Each expert's combine weight is multiplied by a learned factor of its own."""
    routed_scaling_factor: Positive = 1.0
    """Factor of all combine weights."""
    capacity_factor: Positive | None = None
    """In training an expert takes at most ceil(k * tokens * this / E) tokens of a group; further ones are dropped.
    Default: unlimited, no token is dropped. Outside of training no token is dropped either."""
    capacity_group: Count | None = None
    """Tokens of a group, neighbours in the batch; default: a sequence. This, not the mesh, determines which tokens
    are dropped."""
    balance: Literal["all", "first"] = "all"
    """Choices that the load-balancing loss counts: all k of a token or its first."""
    balance_over: Literal["group", "batch"] = "group"
    """Tokens over which it is computed: each group of `capacity_group`, or the full (micro)batch."""
    balance_loss: NotNegative = 0.0
    """Coefficient of the load-balancing loss, which is E * sum over experts (fraction of the choices * mean
    probability), of each layer."""
    router_z_loss: NotNegative = 0.0
    """Coefficient of the router z-loss, which is the mean of log(sum(exp(router logits)))^2, of each layer."""
    balance_bias_rate: NotNegative = 0.0
    """Above 0: probabilities are compared with a bias of each expert, which every step moves by this much towards
    balance."""
    correction_bias: bool = False
    """There is such a bias whatever that rate is, as in published models: it affects which experts are chosen, not their
    combine weights."""
    hash_seed: Natural = 0
    """Random seed of the hash router's map."""
    num_domains: Count = 1
    """For the hash router: number of groups of neighbouring experts; a token's expert is in the group of its
    domain."""
    domain: Natural = 0
    """Domain of text without a domain of its own."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        wrong = [*number_problems(self, lambda name: f"experts.{name}"), *choice_problems(self, "experts.")]
        yield from wrong
        if wrong:
            return
        experts, chosen = self.num_experts, self.experts_per_token
        if chosen > experts:
            yield f"experts.experts_per_token {chosen} is more than the num_experts {experts}"
        elif self.router == "grouped" and experts % chosen:
            yield (
                f"experts.num_experts {experts} is not divisible by the experts_per_token {chosen}: "
                "a grouped router takes one expert of each of as many groups"
            )
        if self.router == "hash":
            if chosen > 1:
                yield f"experts.experts_per_token must be 1 with router: hash, got {chosen}"
            trained = ("router_scale", "balance_loss", "router_z_loss", "balance_bias_rate", "correction_bias")
            if given := [name for name in trained if getattr(self, name)]:
                yield f"experts.{given[0]}: a hash router has nothing to train; remove it"
            if experts % self.num_domains:
                yield f"experts.num_experts {experts} is not divisible by the num_domains {self.num_domains}"
            elif self.domain >= self.num_domains:
                yield f"experts.domain {self.domain}: num_domains is {self.num_domains}, counted from 0"
        elif self.num_domains > 1 or self.domain:
            yield "experts.num_domains and domain are for router: hash"
        yield from self._group_problems()
        if self.normalize == "after_drop" and self.capacity_factor is None:
            yield "experts.normalize after_drop: without capacity_factor nothing is dropped; write before_drop"

    def _group_problems(self) -> Iterator[str]:
        groups, kept = self.num_groups, self.groups_per_token
        if groups > 1 and self.router not in ("sigmoid", "softmax"):
            yield f"experts.num_groups is for router: sigmoid or softmax, not {self.router}"
        elif self.num_experts % groups or (groups > 1 and self.num_experts // groups < 2):
            yield f"experts.num_experts {self.num_experts} do not make num_groups {groups} equal groups of 2 or more"
        elif kept > groups:
            yield f"experts.groups_per_token {kept} is more than the num_groups {groups}"
        elif self.experts_per_token > self.num_experts // groups * kept:
            yield (
                f"experts.experts_per_token {self.experts_per_token} is more than the "
                f"{self.num_experts // groups * kept} experts of groups_per_token {kept} groups"
            )

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added to the probabilities that experts are chosen by."""
        return self.correction_bias or self.balance_bias_rate > 0

    def capacity(self, tokens: int) -> int:
        """Number of tokens that an expert takes of a group of this size, in training."""
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(self.experts_per_token * tokens * self.capacity_factor / self.num_experts))

    @property
    def num_losses(self) -> int:
        """Number of losses of a layer's router."""
        return (self.balance_loss > 0) + (self.router_z_loss > 0)

    @property
    def num_sums(self) -> int:
        """Number of values of a layer that are summed over the batch: for each expert its choices, those dropped, the
        entropy; and the losses."""
        balance = 2 * self.num_experts + 2 if self.balance_over == "batch" else 1  # the tokens there are, and the loss
        losses = (balance if self.balance_loss else 0) + (self.router_z_loss > 0)
        return self.num_experts + 1 + (self.router != "hash") + losses


def choices_of_part(num_experts: int, chosen: int, parts: int, is_grouped: bool) -> int:
    """Largest number of a token's choices that can be of one of so many equal parts of the experts. A grouped router chooses
    one of each of `chosen` groups."""
    local, group = num_experts // parts, num_experts // chosen
    most = min(chosen, local)
    if is_grouped:
        most = min(most, max(-(-(part + 1) * local // group) - part * local // group for part in range(parts)))
    return most


def router_parameters(hidden_size: int, num_experts: int, is_hashed: bool, has_bias: bool, has_scale: bool) -> Specs:
    if not is_hashed:
        yield ParameterSpec("mlp.router.weight", (num_experts, hidden_size), MATRIX, "matrix")
    if has_bias:
        yield ParameterSpec("mlp.choices.balance_bias", (num_experts,), ZEROS)
    if has_scale:
        yield ParameterSpec("mlp.weights.scale", (1, num_experts), ONES)


def parameters(config: ModelConfig) -> Specs:
    experts, count = config.mixture, config.mixture.num_experts
    is_hashed = experts.router == "hash"
    yield from router_parameters(config.hidden_size, count, is_hashed, experts.has_bias, experts.router_scale)
    for spec in mlp.parameters(STACKED.strip("."), config, config.expert_size):
        yield spec._replace(shape=(count, *((1, *spec.shape) if len(spec.shape) == 1 else spec.shape)))
    if experts.shared_ffn_hidden_size:
        yield from mlp.parameters("mlp.shared", config, experts.shared_ffn_hidden_size)


def router_work(hidden_size: int) -> Work:
    """Work of the router, which computes in float32."""
    return Work(kept=Values(0, 0, 4 * hidden_size))
