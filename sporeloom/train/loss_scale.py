# SPDX-License-Identifier: Apache-2.0
"""Dynamic loss scaling: a factor of the loss that keeps float16 gradients from underflow (arXiv:1710.03740); and how many
steps without finite gradients are skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLOAT16_INITIAL = 2.0**32
"""Initial scale of PanGu-alpha and CodeGeeX; it is halved each step until gradients are finite."""

MAX_SCALE = 2.0**64
"""Largest scale. No gradient needs more, and what layers count, which the scale multiplies, too, stays finite: QK-clip would
scale heads with an infinite logit to 0."""


@dataclass
class LossScale:
    """Divided by `factor` after a step whose gradients are not finite, down to 1; multiplied with it after `window` steps
    that were fine, one after another, up to MAX_SCALE. All ranks see the same norm, so all have the same scale."""

    value: float
    factor: float = 2.0
    window: int = 1000
    """0: the scale is never raised."""
    max_skipped: int = 0
    """Number of consecutive steps that are skipped although there is no smaller scale to try."""
    fine_steps: int = 0
    num_skipped: int = 0
    """Number of such steps since the last one with finite gradients."""

    def follow(self, is_finite: bool) -> bool:
        """Record a step. Returns whether a step without finite gradients may be skipped: there is a smaller scale
        to try, or not too many were skipped before it."""
        if is_finite:
            self.num_skipped = 0
            self.fine_steps += 1
            if self.fine_steps == self.window:
                self.value, self.fine_steps = min(self.value * self.factor, MAX_SCALE), 0
            return True
        had_room = self.value > 1.0
        self.value, self.fine_steps = max(self.value / self.factor, 1.0), 0
        self.num_skipped += not had_room
        return had_room or self.num_skipped <= self.max_skipped

    def state(self) -> dict[str, Any]:
        """State that a resumed run needs."""
        return {"value": self.value, "fine_steps": self.fine_steps, "num_skipped": self.num_skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.value, self.fine_steps = float(state["value"]), int(state["fine_steps"])
        self.num_skipped = int(state.get("num_skipped", 0))  # earlier releases had none
