# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization: tokens followed by more reward than the critic expected become more likely.

Policy and critic are one network with two heads; what is written at the end is the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.align.advantages import AdaptiveKL, gae, kl_estimate, token_rewards, token_weights, whitened
from sporeloom.data.batch import Batch
from sporeloom.models.family import family_module
from sporeloom.nn.decoder import DecoderWithValues
from sporeloom.nn.lora import attach_adapters
from sporeloom.nn.objectives import ActorCritic, Policy, ValueLoss
from sporeloom.tasks.policy import PolicyTask, Round


class PPO(PolicyTask):
    """Rewards of a text come at its last token, the divergence from the reference is subtracted at each."""

    objective = ActorCritic
    flags = (
        *("num_ppo_epochs", "kl_coef", "kl_estimator", "kl_target", "kl_horizon", "cliprange", "vf_coef"),
        *("cliprange_value", "gamma", "lam", "whiten_rewards"),
    )
    adaptive: AdaptiveKL | None = None

    def network(self) -> nn.Cell:
        run, config = self.run, self.config
        ms.set_seed(config.seed)
        model = family_module(run.family, "model").Model(run.model)
        if run.lora:
            attach_adapters(model, run.lora)
        policy = Policy(config.cliprange, kl=config.kl_estimator, temperature=config.temperature)
        self.net = DecoderWithValues(model, ActorCritic(policy, ValueLoss(config.cliprange_value), config.vf_coef))
        if config.kl_target:
            self.adaptive = AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
        return self.net

    def beside(self) -> dict[str, tuple[int, ...]]:
        return {"value_head.weight": (1, self.run.model.hidden_size)}

    def before(self, batch: Batch) -> tuple[NDArray[np.float32] | None, NDArray[np.float32]]:
        both = self.evaluated(self.net, batch, parts=2)
        length = batch.tokens.shape[1]
        return both[:, :length] * batch.loss_weights, both[:, length:] * batch.loss_weights

    def collect(self, number: int) -> Round:
        found = super().collect(number)
        self.kl_coef = self.config.kl_coef
        if self.adaptive:
            mask = self.texts(found.texts).loss_weights
            divergence = kl_estimate(found.old, found.reference, "k1") * mask
            self.kl_coef = self.adaptive.coefficient
            self.adaptive.follow(float(divergence.sum(1).mean()), len(found.texts))
        return found

    def judged(
        self, found: Round, mask: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[Any], Sequence[NDArray[Any]]]:
        config = self.config
        divergence = kl_estimate(found.old, found.reference, config.kl_estimator)
        rewards = token_rewards(found.rewards, divergence, mask, self.kl_coef)
        if config.whiten_rewards:
            rewards = whitened(rewards, mask, keep_mean=True)
        advantages, returns = gae(rewards, found.values, mask, config.gamma, config.lam)
        weights = token_weights(mask, "bnpo", config.max_completion_length).astype(np.float32)
        return weights, whitened(advantages, mask), (returns, found.values)

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        return {**super().metrics(step, counts), "kl_coef": self.kl_coef}

    def state(self) -> dict[str, Any]:
        adaptive = {"adaptive": self.adaptive.coefficient} if self.adaptive else {}
        kept = {"kl_coef": self.kl_coef} if self.collected else {}
        return {**super().state(), **adaptive, **kept}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.kl_coef = state.get("kl_coef", self.config.kl_coef)
        if self.adaptive:
            self.adaptive.coefficient = state["adaptive"]


TASK = PPO
