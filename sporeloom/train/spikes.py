# SPDX-License-Identifier: Apache-2.0
"""Loss spikes: skipped steps, and the return to a checkpoint before a spike.

A step that is left out changes nothing; its number counts, so that step n reads the same samples in every run. PaLM went back
about 100 steps before a spike and left out 200 to 500 batches (arXiv:2204.02311 section 5.1).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from sporeloom.checkpoint.manifest import checkpoints
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import parse_ranges

MAX_REWINDS = 5
"""Maximum number of spikes in a run; a run that has more needs another learning rate."""
MIN_LOSSES = 5
"""Minimum number of losses for a median."""


def parse_steps(texts: Iterable[str]) -> tuple[range, ...]:
    """The steps that `--skip-steps` names, counted from 1.

    Raises:
        ConfigError: what names none.
    """
    return parse_ranges("--skip-steps", texts, "steps")


class SpikeGuard:
    """Detects spikes by the losses of the steps before, and decides how far to go back.

    Args:
        factor: a loss above so many times the median of the last ones is a spike.
        window: how many these are.
    """

    def __init__(self, factor: float, window: int):
        self.factor, self.losses = factor, deque[float](maxlen=window)
        self.spikes: list[int] = []
        """Steps whose loss was a spike."""

    def is_spike(self, loss: float) -> bool:
        """Whether the loss of this step is a spike; if not, it counts from now on."""
        enough = len(self.losses) >= min(MIN_LOSSES, self.losses.maxlen or 0)
        if not math.isfinite(loss) or (enough and loss > self.factor * statistics.median(self.losses)):
            return True
        self.losses.append(loss)
        return False

    def to_drop(self, step: int, folder: Path) -> list[Path]:
        """After a spike at `step`: list the checkpoints that led to it, so that the newest of the others is
        restored. None at first; where one spike soon follows another, one more each time, as long as there is
        an older one.

        Raises:
            ConfigError: no other is left, or there were too many spikes.
        """
        again = sum(step - earlier <= (self.losses.maxlen or 0) for earlier in self.spikes)
        self.spikes.append(step)
        if len(self.spikes) > MAX_REWINDS:
            raise ConfigError(f"step {step}: spike number {len(self.spikes)} of the loss; lower --learning-rate")
        found = checkpoints(folder)
        if not found:
            raise ConfigError(f"step {step}: a spike of the loss, and {folder} holds no checkpoint to go back to")
        return found[: min(again, len(found) - 1)]
