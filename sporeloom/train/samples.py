# SPDX-License-Identifier: Apache-2.0
"""Samples of given prompts by the weights of some steps: lines of samples.jsonl in the folder of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import file_lines
from sporeloom.core.log import milestone
from sporeloom.runtime.engine import Engine

FILE = "samples.jsonl"


class Sample(NamedTuple):
    """A text that a model wrote."""

    text: str
    has_ended: bool
    """Whether the model ended it, not the maximum length."""


class Sampler(Protocol):
    """A model that continues prompts by the present weights of the trained network."""

    def sample(self, step: int) -> list[Sample]:
        """Continue all prompts, on all ranks, which all call it. `step` separates random numbers."""
        ...


class Samples:
    """Writes the samples of a run. All ranks make the same calls.

    Args:
        net: the trained network.
    """

    def __init__(
        self, engine: Engine, net: nn.Cell, sampler: Sampler, prompts: Sequence[str], folder: Path, every: int
    ):
        self.engine, self.net, self.sampler = engine, net, sampler
        self.prompts, self.path, self.every = prompts, folder / FILE, every
        self.last_step: int | None = None
        """The step after which samples were written last."""

    def is_due(self, step: int, last: int) -> bool:
        """Whether to sample after `step`."""
        return step == last or (self.every > 0 and step % self.every == 0)

    def write(self, step: int) -> None:
        """Sample after `step`, and write the texts in place of those of later steps, which a resumed run does again.

        Raises:
            ConfigError: they cannot be written.
        """
        self.last_step = step
        self.engine.refresh(self.net, self.net.parallel_report)
        found = self.sampler.sample(step)
        if not self.engine.is_log_rank:
            return
        lines = self._lines_before(step)
        for prompt, sample in zip(self.prompts, found, strict=True):
            values = {"step": step, "prompt": prompt, **sample._asdict()}
            lines.append(json_text(values, ensure_ascii=False))
        try:
            write_text_atomically(self.path, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error.strerror}") from None
        milestone(f"step {step}: {len(found)} samples in {self.path}")

    def _lines_before(self, step: int) -> list[str]:
        if not self.path.exists():
            return []
        return [line for line in file_lines(self.path) if json.loads(line)["step"] < step]
