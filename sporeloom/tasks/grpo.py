# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization: texts better than others for the same prompt become more likely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.align.advantages import (
    group_advantages,
    has_contrast,
    leave_one_out_advantages,
    overlong_penalties,
    rewards_with_kl,
    token_weights,
)
from sporeloom.data.examples import LineTokenizer
from sporeloom.nn.objectives import Policy
from sporeloom.parallel.step import TrainStep
from sporeloom.tasks.policy import PolicyTask, Round
from sporeloom.tasks.rollouts import Rollouts, SampledText
from sporeloom.tasks.run_tools import RunTools, tool_metrics


class GRPO(PolicyTask):
    """Every token of a text has the text's advantage over its group."""

    objective = Policy
    tools: RunTools | None = None
    flags = (
        *("loss_type", "beta", "kl_estimator", "epsilon", "epsilon_high", "num_generations", "num_iterations"),
        *("scale_rewards", "importance_sampling_level", "advantage", "reward_kl_coef"),
        *("max_resamples", "overlong_buffer", "overlong_penalty", "mask_truncated_completions"),
    )

    def loss(self) -> nn.Cell:
        config = self.config
        level = config.importance_sampling_level
        clip = (config.epsilon, config.epsilon_high)
        return Policy(
            *(*clip, config.beta, config.kl_estimator, level == "sequence", config.temperature),
            *(level == "sequence-sum", config.loss_type == "cispo"),
        )

    def data_state(self) -> dict[str, Any]:
        return {**super().data_state(), **(self.tools.identity if self.tools else {})}

    def reading(self, learn_all: bool = False) -> LineTokenizer:
        reading = super().reading(learn_all)
        if self.config.tools:
            self.tools = RunTools.open(self.config, self.tokenizer)
            reading.tools, self.uses_tools = self.tools.toolset.offered, True
        return reading

    def begin(self, step: TrainStep, steps_done: int) -> None:
        super().begin(step, steps_done)
        if self.tools:
            assert isinstance(self.rollouts, Rollouts)
            self.rollouts = self.tools.rollouts(self.rollouts)

    @property
    def draws_per_round(self) -> int:
        count: int = self.config.max_resamples + 1
        return count

    def describe(self) -> str:
        unused = ", with draws that are skipped where nothing is to be replaced" if self.config.max_resamples else ""
        return super().describe() + unused

    def rewarded(self, draw: int) -> tuple[list[SampledText], NDArray[np.float64]]:
        """Texts of a round. Where prompts are replaced, each round has its own draws, so that nothing depends on how many
        earlier ones took; the last draw's prompts fill up what is missing."""
        config, size = self.config, self.config.num_generations
        kept, rewards = list[SampledText](), list[float]()
        first = draw * self.draws_per_round
        if not config.max_resamples:
            return super().rewarded(draw)
        for number in range(self.draws_per_round):
            texts, found = super().rewarded(first + number)
            missing = config.batch_size - len(kept)
            differs = np.repeat(self._are_informative(texts, found), size)
            chosen = np.flatnonzero(differs)[:missing]
            if number == config.max_resamples and len(chosen) < missing:
                others = np.flatnonzero(~differs)[: missing - len(chosen)]
                chosen = np.sort(np.concatenate([chosen, others]))
            kept += [texts[place] for place in chosen]
            rewards += [float(found[place]) for place in chosen]
            if len(kept) == config.batch_size:
                break
        return kept, np.asarray(rewards)

    def rewards(self, texts: Sequence[SampledText]) -> NDArray[np.float64]:
        config, found = self.config, super().rewards(texts)
        if not config.overlong_buffer:
            return found
        lengths = np.array([len(text.tokens) for text in texts])
        penalties = overlong_penalties(lengths, config.max_completion_length, config.overlong_buffer)
        penalized: NDArray[np.float64] = found + config.overlong_penalty * penalties
        return penalized

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        found = super().metrics(step, counts)
        if self.config.max_resamples:
            assert self.collected
            share = self._are_informative(self.collected.texts, self.collected.rewards).mean()
            found["informative_groups"] = float(share)
        if self.tools:
            assert self.collected
            found |= tool_metrics(self.collected.texts)
        return found

    def _are_informative(self, texts: Sequence[SampledText], rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether each group teaches something: its rewards differ, and one of its texts is in the loss."""
        size = self.config.num_generations
        return has_contrast(rewards, size) & self.are_trained(texts).reshape(-1, size).any(1)

    def are_trained(self, texts: Sequence[SampledText]) -> NDArray[np.bool_]:
        if not self.config.mask_truncated_completions:
            return super().are_trained(texts)
        return np.array([text.has_ended for text in texts])

    def judged(
        self, found: Round, mask: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[Any], Sequence[NDArray[Any]]]:
        config = self.config
        trained = mask * self.are_trained(found.texts)[:, None]
        weights = token_weights(trained, config.loss_type, config.max_completion_length).astype(np.float32)
        rewards = found.rewards
        if config.reward_kl_coef:
            rewards = rewards_with_kl(rewards, found.old, found.reference, mask, config.reward_kl_coef)
        of_texts = leave_one_out_advantages if config.advantage == "leave-one-out" else group_advantages
        advantages = of_texts(rewards, config.num_generations, config.scale_rewards)
        return weights, advantages[:, None] * mask, ()


TASK = GRPO
