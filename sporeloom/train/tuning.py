# SPDX-License-Identifier: Apache-2.0
"""What runs are told that make an assistant of a base model. Names of flags are TRL's and PEFT's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sporeloom.align.advantages import KL, LossType, Scale
from sporeloom.align.rewards import RESERVED, reserved_problem
from sporeloom.certificate import about_task
from sporeloom.checkpoint.model_folder import load_config
from sporeloom.cli import option
from sporeloom.data.chat_template import ChatTemplate, read_variables
from sporeloom.data.examples import Line, Reading, read_lines, shortened
from sporeloom.data.tokenizer import Tokenizer, content_hash, find_tokenizer, folder_tokenizer
from sporeloom.errors import ConfigError
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.numbers import (
    MIN_TEMPERATURE,
    Count,
    Natural,
    NotNegative,
    Positive,
    Probability,
    Rate,
    SamplingTemperature,
)
from sporeloom.train.config import Run, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class AdapterFlags:
    """Adapters that are trained in place of the model."""

    heading: ClassVar[str] = "adapters (LoRA)"
    common: ClassVar[tuple[str, ...]] = ("lora_r",)

    lora_r: Count | None = option(None, "train adapters of this rank, and leave the model as it is")
    lora_alpha: Positive = option(16.0, "adapters are multiplied by this / --lora-r")
    lora_dropout: Rate = option(0.0, "on what adapters are given")
    lora_targets: tuple[str, ...] = option(
        ("attention.query", "attention.value"), "matrices with an adapter: ends of their paths, * for one component"
    )
    lora_rslora: bool = option(False, "multiply by --lora-alpha / sqrt(--lora-r)")


@dataclass(frozen=True, kw_only=True)
class TuningConfig(AdapterFlags, TrainingConfig):
    """What all of them have."""

    heading: ClassVar[str] = "data"
    common: ClassVar[tuple[str, ...]] = ("chat_template",)

    wanted: ClassVar[Sequence[Sequence[str]]] = ()
    """Keys of which each line has one set whole."""
    rate: ClassVar[float] = 1e-5
    """Learning rate where the command line says none."""

    data: Path = option(..., "JSON lines, see docs/how-to/sft.md")
    from_checkpoint: Path | None = option(..., "checkpoint folder to begin with; it says family, size and tokenizer")
    chat_template: Path | None = option(
        None, "Jinja file, as transformers has them, for messages; it is kept beside the tokenizer"
    )
    chat_template_kwargs: str | None = option(
        None, "a JSON object of variables for the chat template, as '{\"enable_thinking\": false}'"
    )
    optimizer: Literal["adamw-original", "adamw", "sgd", "adafactor", "adafactor-factored"] = option(
        "adamw", "adamw-original has no bias correction"
    )
    adam_beta2: Rate = option(0.999, "decay of AdamW's second moment")
    weight_decay: NotNegative = option(0.0, "on matrices and embeddings")
    dropout: Rate | None = option(0.0, "dropout rate")
    domain: Natural | None = option(None, "domain of all texts, for models whose experts have domains")
    inspect: Natural = option(0, "show so many examples, what is learned in colour, and stop")

    def base_model(self) -> tuple[str, ModelConfig]:
        assert self.from_checkpoint
        family, model = load_config(self.from_checkpoint)
        return family, model.with_domain(self.domain)

    def model_name(self) -> str:
        return str(self.from_checkpoint)

    def read_data(self, model: ModelConfig | None, seq_len: int) -> list[Line]:
        if self.chat_template:
            ChatTemplate(self.chat_template)
        self.template_variables()
        return read_lines(self.data, self.wanted)

    def template_variables(self) -> dict[str, Any]:
        """Of the chat template, besides transformers' own."""
        return read_variables("--chat-template-kwargs", self.chat_template_kwargs)

    def default_rates(self) -> tuple[float, float]:
        high = 10 * self.rate if self.lora_r else self.rate
        return high, high / 10

    def adapters(self) -> LoRAConfig | None:
        if self.lora_r is None:
            return None
        return LoRAConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=self.lora_targets,
            use_rslora=self.lora_rslora,
        )


def open_tokenizer(run: Run) -> Tokenizer:
    """Of the checkpoint a run begins with, or as its flags say.

    Raises:
        ConfigError: there is none, or it does not fit the model.
    """
    config: Any = run.config
    return folder_tokenizer(run.family, config.from_checkpoint, run.model, config.tokenizer, config.chat_template)


def open_reading(run: Run, tokenizer: Tokenizer, learn_all: bool = False) -> Reading:
    """What makes tokens of the lines of a run."""
    config: Any = run.config
    return Reading(tokenizer, learn_all, run.model.stop_ids, config.template_variables())


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TuningConfig):
    """Supervised fine-tuning: `sporeloom sft`."""

    heading: ClassVar[str] = "what is learned"
    common: ClassVar[tuple[str, ...]] = ("train_on",)
    task: ClassVar[str] = "sft"
    wanted: ClassVar[Sequence[Sequence[str]]] = (("messages",), ("prompt", "completion"))

    train_on: Literal["completions", "everything"] = option(
        "completions", "learn completions and what assistants say, or prompts as well"
    )
    packing: bool = option(False, "several examples a sequence; none sees another")


@dataclass(frozen=True, kw_only=True)
class PairConfig(TuningConfig):
    """What is learned from preferences."""

    wanted: ClassVar[Sequence[Sequence[str]]] = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
    rows_per_unit: ClassVar[int] = 2

    batch_size: Count = option(8, "pairs of one step, over all devices")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(PairConfig):
    """A reward model: `sporeloom reward`."""

    heading: ClassVar[str] = "reward model"
    task: ClassVar[str] = "reward"
    trains_values: ClassVar[bool] = True

    center_rewards_coefficient: NotNegative = option(
        0.0, "keeps rewards near 0: this much of (sum of a pair's)^2 is added"
    )

    def network_config(self, model: ModelConfig) -> ModelConfig:
        return model.with_value_head()


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PairConfig):
    """Direct preference optimization: `sporeloom dpo`."""

    heading: ClassVar[str] = "preferences"
    common: ClassVar[tuple[str, ...]] = ("beta",)
    task: ClassVar[str] = "dpo"
    rate: ClassVar[float] = 1e-6

    beta: Positive = option(0.1, "how far from the model it begins with: rewards are this * log-ratio")
    loss_type: Literal["sigmoid", "hinge", "ipo", "ipo_sum", "robust"] = option(
        "sigmoid", "ipo takes means over tokens, as TRL does, ipo_sum the paper's sums"
    )
    label_smoothing: Rate = option(0.0, "how likely a preference is wrong; for sigmoid and robust")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            yield f"--label-smoothing is for sigmoid and robust, not for --loss-type {self.loss_type}"
        if self.label_smoothing >= 0.5:
            yield f"--label-smoothing must be below 0.5, got {self.label_smoothing:g}"


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(TuningConfig):
    """What samples texts, has them rewarded, and learns from that."""

    heading: ClassVar[str] = "texts and rewards"
    common: ClassVar[tuple[str, ...]] = ("reward", "reward_model", "max_completion_length")
    samples_texts: ClassVar[bool] = True
    wanted: ClassVar[Sequence[Sequence[str]]] = (("prompt",),)
    rate: ClassVar[float] = 1e-6

    batch_size: Count = option(32, "sampled texts of one step, over all devices")
    reward: tuple[str, ...] = option(
        (),
        "FILE.py:FUNCTION ...: called with prompts, completions and columns of their lines; or humaneval-x:LANGUAGE: 1 for a "
        "program that passes its tests; rewards are added up",
    )
    allow_execution: bool = option(
        False, "run the programs that the model writes, isolated, for --reward humaneval-x:..."
    )
    reward_model: Path | None = option(None, "checkpoint of `sporeloom reward`, whose rewards are added")
    max_completion_length: Count = option(64, "tokens sampled for each text")
    temperature: SamplingTemperature = option(
        1.0, f"temperature of sampling, at least {MIN_TEMPERATURE:g}; 1: the model as it is"
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
        if self.reward_model:
            yield from self._reward_model_problems(self.reward_model)

    def _reward_model_problems(self, folder: Path) -> Iterator[str]:
        """It is given the very tokens that were sampled, so it must read as the model writes."""
        assert self.from_checkpoint
        try:
            (family, model), (own_family, own) = load_config(folder), load_config(self.from_checkpoint)
            tokenizers = [find_tokenizer(*each) for each in ((family, folder), (own_family, self.from_checkpoint))]
        except ConfigError as error:
            yield from (f"--reward-model {problem}" for problem in error.problems)
            return
        if not model.value_head:
            yield f"--reward-model {folder}: a model of text; give one of `sporeloom reward`"
        longest = own.seq_len if self.seq_len is None else self.seq_len
        if model.seq_len < longest:
            yield f"--reward-model {folder}: its context of {model.seq_len} tokens is shorter than --seq-len {longest}"
        known = all(path.is_file() for path in tokenizers)
        if family != own_family or (known and content_hash(tokenizers[0]) != content_hash(tokenizers[1])):
            yield f"--reward-model {folder}: has another tokenizer than {self.from_checkpoint}"

    @property
    @abstractmethod
    def has_reference(self) -> bool:
        """Whether the model it begins with is asked, too."""

    def about_task(self, lora: LoRAConfig | None) -> dict[str, Any] | None:
        reward_model = load_config(self.reward_model)[1] if self.reward_model else None
        return about_task(self.task, lora, self.has_reference, reward_model)

    @property
    @abstractmethod
    def updates_per_round(self) -> int:
        """Steps that learn from the same texts."""

    @property
    def texts_per_prompt(self) -> int:
        """Sampled in a round."""
        return 1


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PolicyConfig):
    """Group relative policy optimization: `sporeloom grpo`."""

    heading: ClassVar[str] = "policy"
    common: ClassVar[tuple[str, ...]] = ("num_generations",)
    task: ClassVar[str] = "grpo"

    num_generations: Count = option(8, "texts sampled for each prompt: a group; of --batch-size")
    num_iterations: Count = option(1, "updates from the same texts")
    beta: NotNegative = option(0.0, "of the divergence from the model it begins with, in the loss")
    kl_estimator: KL = option("k3", "of that divergence")
    epsilon: Rate = option(0.2, "probabilities may fall to 1 - this times the old ones")
    epsilon_high: NotNegative | None = option(None, "and rise to 1 + this; --epsilon without it")
    loss_type: LossType = option(
        "grpo", "mean of texts' means (grpo), over tokens (bnpo, dapo), over the longest (dr_grpo)"
    )
    scale_rewards: Scale = option("group", "divide by the standard deviation of the group, the batch, or not at all")
    importance_sampling_level: Literal["token", "sequence"] = option("token", "one ratio a token, or a text")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.batch_size % self.num_generations:
            yield f"--batch-size {self.batch_size} is no whole number of groups of --num-generations {self.num_generations}"
        if self.num_generations < 2:
            yield "--num-generations 1: a text is compared with others of its group; give 2 or more"

    @property
    def has_reference(self) -> bool:
        return self.beta > 0

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

    num_ppo_epochs: Count = option(4, "updates from the same texts")
    kl_coef: NotNegative = option(0.05, "of the divergence from the model it begins with, taken off the rewards")
    kl_estimator: KL = option("k1", "of that divergence")
    kl_target: Positive | None = option(None, "change --kl-coef so that the divergence of a text comes near this")
    kl_horizon: Count = option(10000, "texts over which it does")
    cliprange: Rate = option(0.2, "probabilities may change to 1 - this to 1 + this times the old ones")
    vf_coef: NotNegative = option(0.1, "of the critic's loss")
    cliprange_value: NotNegative = option(0.2, "how far values may change with one round")
    gamma: Probability = option(1.0, "discount of later rewards")
    lam: Probability = option(0.95, "of generalized advantage estimation: 0 trusts the critic, 1 the rewards")
    whiten_rewards: bool = option(False, "rewards with variance 1")

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def updates_per_round(self) -> int:
        return self.num_ppo_epochs
