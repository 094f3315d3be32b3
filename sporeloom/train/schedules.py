# SPDX-License-Identifier: Apache-2.0
"""Learning rate as a function of the updates of the weights; a step that updates nothing does not count."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "inverse-sqrt"]


def learning_rate(
    step: int, high: float, low: float, warmup_steps: int, decay_steps: int, schedule: Schedule = "cosine"
) -> float:
    """Linear warm-up to `high`, then a cosine that reaches `low` at `decay_steps` and stays there; or `high` until
    `decay_steps`, and from there high * sqrt(decay_steps / step), at least `low`.

    `step` counts updates, from 1. The cosine is evaluated at the absolute step, not after the warm-up, as in the reference
    implementation. Source: CodeGeeX codegeex/mindspore/src/utils.py LearningRate; arXiv:2204.02311 section 5.
    """
    if step < warmup_steps:
        return high * step / warmup_steps
    if schedule == "inverse-sqrt":
        return max(low, high * math.sqrt(decay_steps / max(step, decay_steps)))
    progress = min(step, decay_steps) / decay_steps
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * progress))
