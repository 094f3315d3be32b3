# SPDX-License-Identifier: Apache-2.0
"""Learning rate as a function of the step."""

from __future__ import annotations

import math


def learning_rate(step: int, high: float, low: float, warmup_steps: int, decay_steps: int) -> float:
    """Linear warm-up to `high`, then a cosine that reaches `low` at `decay_steps` and stays there.

    `step` counts from 1. The cosine is evaluated at the absolute step, not after the warm-up, as in the originals.
    Source: CodeGeeX codegeex/mindspore/src/utils.py LearningRate.
    """
    if step < warmup_steps:
        return high * step / warmup_steps
    progress = min(step, decay_steps) / decay_steps
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * progress))
