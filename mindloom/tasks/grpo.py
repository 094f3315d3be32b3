# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization: texts that were better than others for the same prompt become likelier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from mindloom.align.advantages import group_advantages, token_weights
from mindloom.align.rewards import load_reward, rewards_of
from mindloom.data.batch import Batch
from mindloom.data.examples import Prompt, example_batch
from mindloom.errors import ConfigError
from mindloom.nn.objectives import Policy
from mindloom.parallel.step import TrainStep
from mindloom.tasks.judges import Judge, Reference
from mindloom.tasks.rollouts import Rollouts, Sampled
from mindloom.tasks.tuning import Tuning

FLAGS = (
    *(
        "loss_type",
        "beta",
        "kl_estimator",
        "epsilon",
        "epsilon_high",
        "num_generations",
        "num_iterations",
        "temperature",
    ),
    *("max_completion_length", "scale_rewards", "importance_sampling_level", "reward"),
)


@dataclass
class Collected:
    """Texts of one round, and all that updates need to know of them."""

    number: int
    """Of the round, counted from 0."""
    texts: list[Sampled]
    rewards: list[float]
    old: NDArray[np.float32]
    """(B, T): how likely the tokens were when they were sampled, as training computes it where it must be known."""
    reference: NDArray[np.float32]
    """(B, T): likewise, under the reference."""
    sampled: NDArray[np.float32]
    """(B, T): likewise, as sampling computed it."""


class GRPO(Tuning):
    """A round samples a group of texts for each prompt; `num_iterations` steps learn from it."""

    is_ahead = False
    prompts: list[Prompt]
    rollouts: Rollouts
    reference: Reference | None = None
    judge: Judge | None = None
    collected: Collected | None = None

    def loss(self) -> nn.Cell:
        config = self.config
        return Policy(
            config.epsilon,
            config.epsilon_high,
            config.beta,
            config.kl_estimator,
            config.importance_sampling_level == "sequence",
            config.temperature,
        )

    def graph_key(self) -> dict[str, Any]:
        return {**super().graph_key(), **{name: getattr(self.config, name) for name in FLAGS}}

    def data_state(self) -> dict[str, Any]:
        return {**super().data_state(), **{name: getattr(self.config, name) for name in FLAGS}}

    def open_data(self) -> None:
        config = self.config
        self.functions = {name: load_reward(name) for name in config.reward}
        room = self.run.seq_len + 1 - config.max_completion_length
        every = self.reading().prompts(self.run.data)
        self.prompts = [prompt for prompt in every if len(prompt.tokens) <= room]
        self.num_samples = len(self.prompts)
        dropped = len(every) - len(self.prompts)
        if not self.prompts:
            raise ConfigError(
                f"{config.data}: all prompts are longer than the {room} tokens that --seq-len {self.run.seq_len} leaves "
                f"beside --max-completion-length {config.max_completion_length}"
            )
        self.text = f"{len(self.prompts):,} prompts" + (f", {dropped:,} dropped, too long" if dropped else "")

    @property
    def prompts_per_round(self) -> int:
        count: int = self.config.batch_size // self.config.num_generations
        return count

    def describe(self) -> str:
        rounds = -(-self.config.steps // self.config.num_iterations)
        return f"{self.config.data}: {self.text}; {rounds * self.prompts_per_round / self.num_samples:.2f} epochs"

    def begin(self, step: TrainStep, steps_done: int) -> None:
        config = self.config
        self.rollouts = Rollouts(self.engine, self.run, self.network_.model, self.tokenizer, config.batch_size)
        if config.beta:
            self.reference = Reference(self.engine, self.run, self.network_, self.loss())
        if config.reward_model:
            self.judge = Judge(self.engine, config.reward_model, config.batch_size)

    def shaped_inputs(self, step: int) -> list[NDArray[Any]]:
        rows, length = self.run.sizes.of_step(step)
        ints, floats = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
        return self.with_dropout_keys(step, [ints, ints, ints, *[floats] * (1 + Policy.num_inputs)])

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        config = self.config
        number, iteration = divmod(step, config.num_iterations)
        if self.collected is None or self.collected.number != number:
            self.collected = self.collect(number)
        found = self.collected
        batch = self.texts(found.texts)
        mask = batch.loss_weights
        weights = token_weights(mask, config.loss_type, config.max_completion_length).astype(np.float32)
        scale = config.scale_rewards
        advantages = group_advantages(np.asarray(found.rewards), config.num_generations, scale).astype(np.float32)
        is_first = np.full(mask.shape, iteration == 0, np.float32)
        return [*batch._replace(loss_weights=weights), advantages[:, None] * mask, found.old, found.reference, is_first]

    def texts(self, texts: Sequence[Sampled]) -> Batch:
        """Texts as a batch with a mask for weights."""
        return example_batch([[text.example(self.prompts)] for text in texts], self.run.seq_len)

    def collect(self, number: int) -> Collected:
        """Sample and reward the texts of a round. All ranks get the same."""
        config = self.config
        chosen = self.samples(number, self.prompts_per_round)
        numbers = np.repeat(chosen, config.num_generations)
        first = number * len(numbers)
        self.engine.refresh(self.network_, self.network_.parallel_report)
        texts = self.rollouts.sample(self.prompts, numbers.tolist(), range(first, first + len(numbers)))
        batch = self.texts(texts)
        reference = np.zeros_like(batch.loss_weights)
        if self.reference:
            reference = self.evaluated(self.reference.net, batch) * batch.loss_weights
        sampled = np.zeros_like(batch.loss_weights)
        for row, text in enumerate(texts):
            sampled[row, batch.loss_weights[row] > 0] = text.log_probs
        old = self.evaluated(self.network_, batch) * batch.loss_weights if config.num_iterations > 1 else sampled
        return Collected(number, texts, self.rewards(texts), old, reference, sampled)

    def rewards(self, texts: Sequence[Sampled]) -> list[float]:
        """Of each text, added up over all that reward."""
        values = np.zeros(len(texts))
        if self.functions:
            # One rank asks the functions, which may say something else each time, and tells the others.
            told: Any = None
            if self.engine.is_log_rank:
                told = self._from_functions(texts)
            source = self.run.strategy.mesh.first_rank_of_last_stage
            told = self.engine.share(told, source)
            if isinstance(told, str):
                raise ConfigError(told)
            values += told
        if self.judge:
            values += self.judge.rewards([text.example(self.prompts) for text in texts], self.run.seq_len)
        return [float(value) for value in values]

    def _from_functions(self, texts: Sequence[Sampled]) -> list[float] | str:
        prompts = [self.prompts[text.prompt] for text in texts]
        completions = [self.tokenizer.decode(text.tokens[: -1 if text.has_ended else None]) for text in texts]
        values = np.zeros(len(texts))
        try:
            for name, function in self.functions.items():
                asked = [prompt.text for prompt in prompts]
                values += rewards_of(name, function, asked, completions, [prompt.columns for prompt in prompts])
        except ConfigError as error:
            return error.problems[0]
        return [float(value) for value in values]

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        assert counts is not None and self.collected
        texts, rewards = self.collected.texts, np.asarray(self.collected.rewards)
        tokens = sum(len(text.tokens) for text in texts)
        told = dict(zip(Policy.metrics, (float(count) / tokens for count in counts), strict=True))
        groups = rewards.reshape(-1, self.config.num_generations)
        told |= {
            "reward": float(rewards.mean()),
            "reward_std": float(groups.std(1).mean()),
            "completion_length": tokens / len(texts),
            "ended": sum(text.has_ended for text in texts) / len(texts),
        }
        if not self.config.beta:
            del told["kl"]
        found = self.collected
        if self.config.temperature != 1:
            del told["sampling_difference"]
        elif self.config.num_iterations > 1:
            told["sampling_difference"] = float(np.abs(found.old - found.sampled).sum() / tokens)
        return told

    def state(self) -> dict[str, Any]:
        """The round that is being learned from, where it is not over."""
        found = self.collected
        if found is None or self.config.num_iterations == 1:
            return {}
        return {
            "round": found.number,
            "texts": [asdict(text) for text in found.texts],
            "rewards": found.rewards,
            "old": found.old.tolist(),
            "reference": found.reference.tolist(),
            "sampled": found.sampled.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state:
            self.collected = Collected(
                state["round"],
                [Sampled(**text) for text in state["texts"]],
                state["rewards"],
                np.asarray(state["old"], np.float32),
                np.asarray(state["reference"], np.float32),
                np.asarray(state["sampled"], np.float32),
            )


TASK = GRPO
