# SPDX-License-Identifier: Apache-2.0
"""Learning rate as a function of the updates of the weights; a step that updates nothing does not count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["cosine", "inverse-sqrt", "constant", "linear", "polynomial", "cosine-restarts", "wsd"]
DecayShape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class ScheduleOptions:
    """Settings that some schedules have besides rates and steps."""

    decay_fraction: float = 0.1
    """Fraction of the steps up to `decay_steps` in which the rate of `wsd` decays."""
    decay_shape: DecayShape = "linear"
    """Shape of that decay."""
    power: float = 2.0
    """Power of `polynomial`."""
    cycles: int = 2
    """Number of cycles of `cosine-restarts`."""


def learning_rate(
    step: int,
    high: float,
    low: float,
    warmup_steps: int,
    decay_steps: int,
    schedule: Schedule = "cosine",
    options: ScheduleOptions | None = None,
) -> float:
    """Linear warm-up to `high`, then down to `low`, which is reached at `decay_steps` and kept.

    `step` counts updates, from 1. With p from 0 at the end of the warm-up to 1 at `decay_steps`, and f the fraction of
    (high - low) above `low`:

    - `cosine`: (1 + cos(pi step / decay_steps)) / 2, evaluated at the absolute step, not after the warm-up, as in the
      reference implementation. Source: CodeGeeX codegeex/mindspore/src/utils.py LearningRate.
    - `inverse-sqrt`: `high` until `decay_steps`, from there high * sqrt(decay_steps / step), at least `low`. Source:
      arXiv:2204.02311 section 5.
    - `constant`: `high`.
    - `linear`: f = 1 - p; `polynomial`: f = (1 - p)^power.
    - `cosine-restarts`: f = (1 + cos(pi q)) / 2, where q runs from 0 to 1 in each of `cycles` equal parts. Source:
      arXiv:1608.03983.
    - `wsd`: `high`, then f = 1 - d, (1 + cos(pi d)) / 2 or 1 - sqrt(d), where d runs from 0 to 1 in the last
      `decay_fraction` of `decay_steps`. Sources: arXiv:2404.06395; of 1-sqrt arXiv:2405.18392.
    """
    options = options or ScheduleOptions()
    if step < warmup_steps:
        return high * step / warmup_steps
    if schedule == "constant":
        return high
    if schedule == "inverse-sqrt":
        return max(low, high * math.sqrt(decay_steps / max(step, decay_steps)))
    if schedule == "cosine":
        return low + (high - low) * _cosine(min(step, decay_steps) / decay_steps)
    if step >= decay_steps:
        return low
    return low + (high - low) * _fraction(step, warmup_steps, decay_steps, schedule, options)


def _fraction(step: int, warmup_steps: int, decay_steps: int, schedule: Schedule, options: ScheduleOptions) -> float:
    """Fraction of the way from `low` up to `high`, before `decay_steps`."""
    done, all_steps = step - warmup_steps, decay_steps - warmup_steps
    progress = done / all_steps
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "polynomial":
        return float((1.0 - progress) ** options.power)
    if schedule == "cosine-restarts":
        return _cosine(done * options.cycles % all_steps / all_steps)  # whole numbers: a cycle begins exactly
    start = wsd_decay_start(decay_steps, options.decay_fraction)
    decayed = max(0.0, (step - start) / (decay_steps - start))
    if options.decay_shape == "cosine":
        return _cosine(decayed)
    return 1.0 - (decayed if options.decay_shape == "linear" else math.sqrt(decayed))


def wsd_decay_start(decay_steps: int, decay_fraction: float) -> float:
    """Step after which the rate of `wsd` falls."""
    return decay_steps * (1.0 - decay_fraction)


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
