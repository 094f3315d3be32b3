# SPDX-License-Identifier: Apache-2.0
"""Flags about texts that the model writes while it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import read_utf8
from sporeloom.core.lines import split_lines
from sporeloom.core.numbers import Count, Natural, NotNegative
from sporeloom.strategy.config import Strategy

MAX_PROMPTS = 256


@dataclass(frozen=True, kw_only=True)
class SampleFlags:
    """Texts that the present weights generate for given prompts."""

    heading: ClassVar[str] = "samples"
    trains_values: ClassVar[bool] = False
    """Whether the network returns a value for each token in place of logits."""

    sample_prompts: Path | None = option(
        None,
        "file of prompts, one a line, that the model continues while it is trained, and after the last step; the texts go "
        "to samples.jsonl of the output folder (default: none)",
    )
    evaluate_every: Natural = option(0, "interval in steps between these samples; 0: after the last step only")
    sample_tokens: Count = option(64, "maximum number of tokens of a sample")
    sample_temperature: NotNegative = option(0.0, "sampling temperature of samples; 0: the most likely tokens")
    sample_chat: bool = option(False, "treat each of --sample-prompts as a user message, in the model's chat template")

    def prompts(self) -> list[str]:
        """The prompts of `--sample-prompts`; none without it.

        Raises:
            ConfigError: they cannot be read, or there are too many.
        """
        if self.sample_prompts is None:
            return []
        found = [line for line in split_lines(read_utf8(self.sample_prompts)) if line.strip()]
        if not 0 < len(found) <= MAX_PROMPTS:
            raise ConfigError(
                f"--sample-prompts {self.sample_prompts}: {len(found)} prompts; give 1 to {MAX_PROMPTS}, one a line"
            )
        return found

    def sample_problems(self) -> Iterator[str]:
        """List the problems of these flags."""
        problems = Problems()
        problems.of(self.prompts)
        yield from problems
        if self.sample_prompts is None:
            needs = {"--evaluate-every": self.evaluate_every, "--sample-chat": self.sample_chat}
            yield from (
                f"{flag} is for samples: give --sample-prompts FILE, too" for flag, value in needs.items() if value
            )
        elif self.trains_values:
            yield f"--sample-prompts {self.sample_prompts}: a reward model generates no text; leave it out"

    def sampling_problems(self, strategy: Strategy) -> Iterator[str]:
        """List what samples cannot be generated under."""
        if self.sample_prompts is None:
            return
        yield from strategy.axis_problems("sampling")
        if strategy.pipeline.virtual_stages > 1:
            yield (
                f"{strategy.at('pipeline.virtual_stages')}: --sample-prompts runs the model a stage after the other; leave "
                "virtual stages out"
            )
