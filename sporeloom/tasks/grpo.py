# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization: texts better than others for the same prompt become more likely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.align.advantages import group_advantages, leave_one_out_advantages, rewards_with_kl, token_weights
from sporeloom.nn.objectives import Policy
from sporeloom.tasks.policy import PolicyTask, Round


class GRPO(PolicyTask):
    """Every token of a text has the text's advantage over its group."""

    objective = Policy
    flags = (
        *("loss_type", "beta", "kl_estimator", "epsilon", "epsilon_high", "num_generations", "num_iterations"),
        *("scale_rewards", "importance_sampling_level", "advantage", "reward_kl_coef"),
    )

    def loss(self) -> nn.Cell:
        config = self.config
        level = config.importance_sampling_level
        clip = (config.epsilon, config.epsilon_high)
        return Policy(
            *clip, config.beta, config.kl_estimator, level == "sequence", config.temperature, level == "sequence-sum"
        )

    def judged(
        self, found: Round, mask: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[Any], Sequence[NDArray[Any]]]:
        config = self.config
        weights = token_weights(mask, config.loss_type, config.max_completion_length).astype(np.float32)
        rewards = found.rewards
        if config.reward_kl_coef:
            rewards = rewards_with_kl(rewards, found.old, found.reference, mask, config.reward_kl_coef)
        of_texts = leave_one_out_advantages if config.advantage == "leave-one-out" else group_advantages
        advantages = of_texts(rewards, config.num_generations, config.scale_rewards)
        return weights, advantages[:, None] * mask, ()


TASK = GRPO
