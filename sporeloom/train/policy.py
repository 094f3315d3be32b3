# SPDX-License-Identifier: Apache-2.0
"""Configurations of reinforcement learning. Flag names follow TRL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sporeloom.align.advantages import KL, LossType, Scale
from sporeloom.align.reward_server import address_problem, is_url
from sporeloom.align.rewards import RESERVED, reserved_problem
from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import (
    MIN_TEMPERATURE,
    Count,
    Natural,
    NotNegative,
    Positive,
    Probability,
    Rate,
    SamplingTemperature,
)
from sporeloom.data.examples import Line, shortened
from sporeloom.data.tokenizer import content_hash, find_tokenizer
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.strategy.certificate import about_task
from sporeloom.train.tool_flags import ToolFlags
from sporeloom.train.tuning import TuningConfig


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(TuningConfig):
    """Reinforcement learning: texts are sampled from the model, scored with rewards, and trained on."""

    heading: ClassVar[str] = "sampling and rewards"
    common: ClassVar[tuple[str, ...]] = ("reward", "reward_model", "max_completion_length")
    samples_texts: ClassVar[bool] = True
    wanted: ClassVar[Sequence[Sequence[str]]] = (("prompt",),)
    rate: ClassVar[float] = 1e-6

    batch_size: Count = option(32, "number of sampled texts in one step, over all devices")
    reward: tuple[str, ...] = option(
        (),
        "FILE.py:FUNCTION ...: reward functions, called with prompts, completions and further keys of the "
        "lines; or http://HOST:PORT/PATH, a server that gets these as JSON; or "
        "humaneval-x:LANGUAGE, which gives 1 for a program that passes its tests; all rewards are added (default: none)",
    )
    reward_timeout_s: Positive = option(600.0, "seconds that an answer of a server of --reward may take")
    reward_retries: Natural = option(
        3,
        "number of times that a request to a server of --reward is repeated, where it cannot be reached, takes too "
        "long or is overloaded",
    )
    allow_execution: bool = option(
        False, "run the programs that the model writes, isolated, for --reward humaneval-x:... and --tools python"
    )
    reward_model: Path | None = option(
        None, "checkpoint of `sporeloom reward`, whose rewards are added (default: none)"
    )
    max_completion_length: Count = option(64, "maximum number of tokens sampled for each text")
    temperature: SamplingTemperature = option(
        1.0, f"sampling temperature, at least {MIN_TEMPERATURE:g}; 1: the model's own probabilities"
    )

    def read_data(self, model: ModelConfig | None, seq_len: int) -> list[Line]:
        lines = super().read_data(model, seq_len)
        if self.reward:
            clashes = [(line.place, key) for line in lines for key in RESERVED if key in line.values]
            if clashes:
                raise ConfigError(shortened(self.data, [f"{at}: {reserved_problem(key)}" for at, key in clashes]))
        return lines

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.reward and not self.reward_model:
            yield "no reward: give --reward FILE.py:FUNCTION, or --reward-model CHECKPOINT"
        if not self.allow_execution and any(name.startswith("humaneval-x:") for name in self.reward):
            yield "--reward humaneval-x:... runs programs that a model wrote: give --allow-execution, too"
        yield from (problem for name in self.reward if is_url(name) and (problem := address_problem(name)))
        if self.reward_model:
            yield from self._reward_model_problems(self.reward_model)

    def _reward_model_problems(self, folder: Path) -> Iterator[str]:
        """Check that the reward model can read the sampled tokens: it gets their ids, so it must have the same
        tokenizer."""
        assert self.from_checkpoint
        try:
            (family, model), (own_family, own) = load_config(folder), load_config(self.from_checkpoint)
            tokenizers = [find_tokenizer(*each) for each in ((family, folder), (own_family, self.from_checkpoint))]
        except ConfigError as error:
            yield from (f"--reward-model {problem}" for problem in error.problems)
            return
        if not model.value_head:
            yield f"--reward-model {folder}: a language model; give a checkpoint of `sporeloom reward`"
        longest = own.seq_len if self.seq_len is None else self.seq_len
        if model.seq_len < longest:
            yield f"--reward-model {folder}: its context of {model.seq_len} tokens is shorter than --seq-len {longest}"
        known = all(path.is_file() for path in tokenizers)
        if family != own_family or (known and content_hash(tokenizers[0]) != content_hash(tokenizers[1])):
            yield f"--reward-model {folder}: its tokenizer differs from that of {self.from_checkpoint}"

    @property
    @abstractmethod
    def has_reference(self) -> bool:
        """Whether log-probabilities of the initial model are needed, too."""

    def about_task(self, lora: LoRAConfig | None) -> dict[str, Any] | None:
        reward_model = load_config(self.reward_model)[1] if self.reward_model else None
        return about_task(self.task, lora, self.has_reference, reward_model)

    @property
    @abstractmethod
    def updates_per_round(self) -> int:
        """Number of optimizer steps on the same sampled texts."""

    @property
    def texts_per_prompt(self) -> int:
        """Number of texts sampled for each prompt in a round."""
        return 1


EPSILON = 0.2


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(ToolFlags, PolicyConfig):
    """Group relative policy optimization: `sporeloom grpo`."""

    heading: ClassVar[str] = "policy"
    common: ClassVar[tuple[str, ...]] = ("num_generations",)
    task: ClassVar[str] = "grpo"

    num_generations: Count = option(8, "number of texts sampled for each prompt (the group); it divides --batch-size")
    num_iterations: Count = option(1, "number of updates on the same sampled texts")
    beta: NotNegative = option(0.0, "coefficient of the KL divergence from the initial model in the loss")
    kl_estimator: KL = option("k3", "estimator of that KL divergence")
    epsilon: Rate = option(
        EPSILON,
        "clipping range below: probability ratios are clipped at 1 - this; cispo clips only above: --epsilon-high",
    )
    epsilon_high: NotNegative | None = option(
        None, "clipping range above: probability ratios are clipped at 1 + this (default: --epsilon)"
    )
    loss_type: LossType = option(
        "grpo",
        "normalization of the loss: mean over each text, then over texts (grpo), over tokens (bnpo, "
        "dapo), or over the maximum length (dr_grpo); cispo is the mean over tokens of log-probabilities whose weights are "
        "clipped importance ratios",
    )
    max_resamples: Natural = option(
        0,
        "number of times that prompts whose texts all have the same reward are replaced by other prompts in a step (DAPO's "
        "dynamic sampling), and of draws of prompts that each step has for that, skipped where it needs fewer; 0: never",
    )
    overlong_buffer: Natural = option(
        0,
        "number of tokens before --max-completion-length from which longer texts get a penalty that grows to "
        "--overlong-penalty (DAPO's soft overlong punishment); 0: none",
    )
    overlong_penalty: Positive = option(1.0, "penalty of a text of the maximum length, with --overlong-buffer")
    mask_truncated_completions: bool = option(
        False, "leave texts that the maximum length cut off out of the loss (DAPO's overlong filtering)"
    )
    scale_rewards: Scale = option(
        "group", "standard deviation that advantages are divided by: of the group, of the batch, or none"
    )
    importance_sampling_level: Literal["token", "sequence", "sequence-sum"] = option(
        "token", "level of the importance ratio: one a token, one a text (mean of log-ratios), or their sum (RLOO)"
    )
    advantage: Literal["group", "leave-one-out"] = option(
        "group", "baseline of a text's reward: the mean of its group, or of the group's other texts (RLOO)"
    )
    reward_kl_coef: NotNegative = option(
        0.0, "coefficient of a text's KL divergence from the initial model, subtracted from its reward (RLOO)"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.tool_problems(self.allow_execution)
        if self.batch_size % self.num_generations:
            yield f"--batch-size {self.batch_size} is not a multiple of --num-generations {self.num_generations}"
        if self.num_generations < 2:
            yield "--num-generations 1: a text is compared with the others of its group; give 2 or more"
        if self.overlong_buffer > self.max_completion_length:
            yield (
                f"--overlong-buffer {self.overlong_buffer} is longer than --max-completion-length "
                f"{self.max_completion_length}; give less"
            )
        if self.loss_type == "cispo" and self.importance_sampling_level != "token":
            level = self.importance_sampling_level
            yield f"--loss-type cispo has one ratio a token; leave --importance-sampling-level {level} out"
        if self.loss_type == "cispo" and self.epsilon != EPSILON and self.epsilon_high is not None:
            yield (
                f"--loss-type cispo clips only above, at 1 + --epsilon-high {self.epsilon_high:g}; leave --epsilon "
                f"{self.epsilon:g} out"
            )
        if self.advantage == "leave-one-out" and self.scale_rewards == "group":
            yield "--advantage leave-one-out is not divided by a deviation of the group: give --scale-rewards none or batch"

    @property
    def has_reference(self) -> bool:
        return self.beta > 0 or self.reward_kl_coef > 0

    @property
    def updates_per_round(self) -> int:
        return self.num_iterations

    @property
    def texts_per_prompt(self) -> int:
        return self.num_generations


@dataclass(frozen=True, kw_only=True)
class PPOConfig(PolicyConfig):
    """Proximal policy optimization: `sporeloom ppo`."""

    heading: ClassVar[str] = "policy"
    task: ClassVar[str] = "ppo"

    num_ppo_epochs: Count = option(4, "number of updates on the same sampled texts")
    kl_coef: NotNegative = option(
        0.05, "coefficient of the KL divergence from the initial model, subtracted from the rewards"
    )
    kl_estimator: KL = option("k1", "estimator of that KL divergence")
    kl_target: Positive | None = option(
        None, "target of the KL divergence of a text; --kl-coef is adapted to reach it (default: --kl-coef is constant)"
    )
    kl_horizon: Count = option(10000, "number of texts over which --kl-coef is adapted")
    cliprange: Rate = option(0.2, "clipping range of probability ratios: 1 - this to 1 + this")
    vf_coef: NotNegative = option(0.1, "coefficient of the critic's loss")
    cliprange_value: NotNegative = option(0.2, "clipping range of value updates in one round")
    gamma: Probability = option(1.0, "discount factor of later rewards")
    lam: Probability = option(
        0.95, "lambda of generalized advantage estimation: 0 relies on the critic alone, 1 on the rewards alone"
    )
    whiten_rewards: bool = option(False, "scale rewards to variance 1")

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def updates_per_round(self) -> int:
        return self.num_ppo_epochs
