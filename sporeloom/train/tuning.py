# SPDX-License-Identifier: Apache-2.0
"""Configurations of fine-tuning and preference training. Flag names follow TRL and PEFT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.command_line import option
from sporeloom.core.numbers import (
    Count,
    Natural,
    NotNegative,
    Positive,
    Rate,
)
from sporeloom.data.chat_template import ChatTemplate, read_variables
from sporeloom.data.examples import Line, LineTokenizer, read_lines
from sporeloom.data.tokenizer import Tokenizer, folder_tokenizer
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.train.config import Run, TrainingConfig
from sporeloom.train.flags import Optimizer, ValidationFlags
from sporeloom.train.max_logit_flags import MaxLogitFlags
from sporeloom.train.validation_data import validation_problems


@dataclass(frozen=True, kw_only=True)
class AdapterFlags:
    """Low-rank adapters, trained while the model's own weights stay frozen."""

    heading: ClassVar[str] = "adapters (LoRA)"
    common: ClassVar[tuple[str, ...]] = ("lora_r",)

    lora_r: Count | None = option(
        None, "rank of LoRA adapters, which are trained while the model stays frozen (default: train all weights)"
    )
    lora_alpha: Positive = option(16.0, "LoRA scale times the rank: adapters are multiplied by this / --lora-r")
    lora_dropout: Rate = option(0.0, "dropout rate of the adapters' inputs")
    lora_targets: tuple[str, ...] = option(
        ("attention.query", "attention.value"),
        "matrices that get an adapter: ends of their paths, * for one component, or PEFT's names: q_proj, all-linear, ...",
    )
    lora_rslora: bool = option(False, "rank-stabilized LoRA: multiply adapters by --lora-alpha / sqrt(--lora-r)")


@dataclass(frozen=True, kw_only=True)
class TuningConfig(AdapterFlags, TrainingConfig):
    """The configuration that all tuning tasks share."""

    heading: ClassVar[str] = "data"
    common: ClassVar[tuple[str, ...]] = ("chat_template",)

    wanted: ClassVar[Sequence[Sequence[str]]] = ()
    """Alternative sets of keys; each line has one set completely."""
    rate: ClassVar[float] = 1e-5
    """Default of the maximum learning rate."""

    data: Path = option(..., "training data: JSON lines, see docs/how-to/sft.md")
    from_checkpoint: Path | None = option(
        ..., "checkpoint folder with the initial weights; it determines family, size and tokenizer"
    )
    chat_template: Path | None = option(
        None,
        "Jinja file of a chat template, as in transformers; it is saved with the tokenizer (default: the checkpoint's)",
    )
    chat_template_kwargs: str | None = option(
        None, "JSON object of variables for the chat template, as '{\"enable_thinking\": false}' (default: none)"
    )
    optimizer: Optimizer = option("adamw", "optimizer; adamw-original is AdamW without bias correction")
    adam_beta2: Rate = option(0.999, "decay rate of AdamW's second moment")
    weight_decay: NotNegative = option(0.0, "weight decay of matrices and embeddings")
    dropout: Rate | None = option(0.0, "dropout rate")
    domain: Natural | None = option(None, "domain of all texts, for models with domain-routed experts (default: none)")
    inspect: Natural = option(0, "print this many examples, with the trained tokens in colour, and stop; 0: train")

    def base_model(self) -> tuple[str, ModelConfig]:
        assert self.from_checkpoint
        family, model = load_config(self.from_checkpoint)
        return family, model.with_domain(self.domain)

    @property
    def only_looks(self) -> bool:
        return self.inspect > 0

    def model_name(self) -> str:
        return str(self.from_checkpoint)

    def read_data(self, model: ModelConfig | None, seq_len: int) -> list[Line]:
        if self.chat_template:
            ChatTemplate(self.chat_template)
        self.template_variables()
        return read_lines(self.data, self.wanted)

    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template, besides those of transformers."""
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
    """Open the tokenizer of the checkpoint that the run starts from, or the one its flags name.

    Raises:
        ConfigError: there is none, or it does not fit the model.
    """
    config: Any = run.config
    return folder_tokenizer(run.family, config.from_checkpoint, run.model, config.tokenizer, config.chat_template)


def open_reading(run: Run, tokenizer: Tokenizer, learn_all: bool = False) -> LineTokenizer:
    """Build the object that tokenizes the lines of a run."""
    config: Any = run.config
    return LineTokenizer(tokenizer, learn_all, run.model.stop_ids, config.template_variables())


@dataclass(frozen=True, kw_only=True)
class ValidatedConfig(ValidationFlags, TuningConfig):
    """Tuning with a loss that other lines than those of the training data have, too."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from validation_problems(self, lambda path: read_lines(path, self.wanted))


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig(ValidatedConfig):
    """Training on prompts with completions, or conversations."""

    heading: ClassVar[str] = "training targets"
    common: ClassVar[tuple[str, ...]] = ("train_on",)
    wanted: ClassVar[Sequence[Sequence[str]]] = (("messages",), ("prompt", "completion"))

    train_on: Literal["completions", "everything"] = option(
        "completions", "tokens that are trained on: completions and assistant messages, or prompts as well"
    )
    packing: bool = option(False, "pack several examples into a sequence; attention does not cross their boundaries")


@dataclass(frozen=True, kw_only=True)
class SFTConfig(MaxLogitFlags, ExamplesConfig):
    """Supervised fine-tuning: `sporeloom sft`."""

    heading: ClassVar[str] = ExamplesConfig.heading
    task: ClassVar[str] = "sft"


@dataclass(frozen=True, kw_only=True)
class PairConfig(ValidatedConfig):
    """Training on pairs of a preferred and a rejected text."""

    wanted: ClassVar[Sequence[Sequence[str]]] = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
    rows_per_unit: ClassVar[int] = 2

    batch_size: Count = option(8, "number of pairs in one step, over all devices")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(PairConfig):
    """A reward model: `sporeloom reward`."""

    heading: ClassVar[str] = "reward model"
    task: ClassVar[str] = "reward"
    trains_values: ClassVar[bool] = True

    center_rewards_coefficient: NotNegative = option(
        0.0,
        "coefficient of the penalty that keeps rewards near 0: this times (sum of a pair's rewards)^2 is "
        "added to the loss",
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

    beta: Positive = option(
        0.1, "strength of the KL constraint to the initial model: rewards are this times the log-ratio"
    )
    loss_type: Literal["sigmoid", "hinge", "ipo", "ipo_sum", "robust"] = option(
        "sigmoid", "loss function; ipo averages over tokens as TRL does, ipo_sum adds them up as the paper does"
    )
    label_smoothing: Rate = option(0.0, "probability that a preference is wrong; for sigmoid and robust")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            yield f"--label-smoothing is for sigmoid and robust, not for --loss-type {self.loss_type}"
        if self.label_smoothing >= 0.5:
            yield f"--label-smoothing must be below 0.5, got {self.label_smoothing:g}"
