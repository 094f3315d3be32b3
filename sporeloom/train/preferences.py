# SPDX-License-Identifier: Apache-2.0
"""Configuration of the preference tasks other than DPO. Names and defaults of flags are TRL's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, NotNegative, Positive, Rate
from sporeloom.data.examples import Line, shortened
from sporeloom.models.config import ModelConfig
from sporeloom.train.tuning import PairConfig, TuningConfig


@dataclass(frozen=True, kw_only=True)
class SimPOConfig(PairConfig):
    """Simple preference optimization, without a reference: `sporeloom simpo`."""

    heading: ClassVar[str] = "preferences"
    common: ClassVar[tuple[str, ...]] = ("beta", "gamma")
    task: ClassVar[str] = "simpo"
    rate: ClassVar[float] = 1e-6

    beta: Positive = option(2.0, "scale of rewards: a reward is this times the log-probability of a text")
    gamma: NotNegative = option(1.0, "margin by which the reward of the preferred text is to be larger")
    label_smoothing: Rate = option(0.0, "probability that a preference is wrong")
    length_normalization: bool = option(
        True, "use the mean log-probability of a text's tokens; without it their sum, as CPO does (then give --gamma 0)"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.label_smoothing >= 0.5:
            yield f"--label-smoothing must be below 0.5, got {self.label_smoothing:g}"


@dataclass(frozen=True, kw_only=True)
class ORPOConfig(PairConfig):
    """Odds ratio preference optimization, without a reference: `sporeloom orpo`."""

    heading: ClassVar[str] = "preferences"
    common: ClassVar[tuple[str, ...]] = ("beta",)
    task: ClassVar[str] = "orpo"
    rate: ClassVar[float] = 1e-6

    beta: Positive = option(0.1, "weight of the odds ratio next to the likelihood of the preferred texts")


@dataclass(frozen=True, kw_only=True)
class KTOConfig(TuningConfig):
    """Kahneman-Tversky optimization of single texts: `sporeloom kto`."""

    heading: ClassVar[str] = "preferences"
    common: ClassVar[tuple[str, ...]] = ("beta",)
    task: ClassVar[str] = "kto"
    wanted: ClassVar[Sequence[Sequence[str]]] = (("prompt", "completion", "label"),)
    rate: ClassVar[float] = 1e-6

    batch_size: Count = option(8, "number of texts in one step, over all devices")
    beta: Positive = option(
        0.1, "strength of the KL constraint to the initial model: rewards are this times the log-ratio"
    )
    loss_type: Literal["kto", "apo_zero_unpaired"] = option(
        "kto", "loss function; apo_zero_unpaired does without the KL divergence of mismatched texts"
    )
    desirable_weight: Positive = option(1.0, "weight of texts whose label is true")
    undesirable_weight: Positive = option(1.0, "weight of texts whose label is false")

    def read_data(self, model: ModelConfig | None, seq_len: int) -> list[Line]:
        lines = super().read_data(model, seq_len)
        wrong = [line for line in lines if not isinstance(line.values["label"], bool)]
        if wrong:
            problems = [
                f"{line.place}: label must be true or false, got {line.values['label']!r:.40}" for line in wrong
            ]
            raise ConfigError(shortened(self.data, problems))
        if len(lines) < 2 and self.loss_type == "kto":
            raise ConfigError(
                f"{self.data}: one line; kto compares a prompt with another line's text: give two or more"
            )
        return lines
