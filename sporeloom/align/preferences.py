# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs of texts in float64, to validate with: what the objectives of `nn` compute in a training step.

Arrays are (N, 2) over pairs, the chosen text first, or (N,). Names and formulas are TRL's; for sources see `nn.objectives`
and `nn.preferences`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sporeloom.core import elementary

Floats = NDArray[np.float64]
MAX_MEAN_LOG_PROB = -1e-7
"""Upper bound of the mean log-probability whose odds ORPO computes: those of probability 1 are infinite."""


@dataclass(frozen=True)
class PairTotals:
    """Log-probabilities or rewards of the texts of pairs by a model."""

    sums: Floats
    """(N, 2): sums over trained tokens of their log-probabilities; of a reward model the rewards."""
    lengths: Floats
    """(N, 2): numbers of trained tokens."""
    nll: float = 0.0
    """Mean negative log-likelihood of all tokens of the chosen texts, prompts included."""

    @property
    def means(self) -> Floats:
        """(N, 2): means over trained tokens."""
        found: Floats = self.sums / np.maximum(self.lengths, 1.0)
        return found


def dpo_losses(
    policy: PairTotals, reference: Floats, loss_type: str, beta: float, label_smoothing: float
) -> tuple[Floats, Floats]:
    """Loss (N,) and rewards (N, 2) of each pair; `reference`: sums of the reference's log-probabilities."""
    ratios = policy.sums - reference
    margins = ratios[:, 0] - ratios[:, 1]
    if loss_type == "ipo":
        means = ratios / np.maximum(policy.lengths, 1.0)
        losses = np.square(means[:, 0] - means[:, 1] - 1.0 / (2.0 * beta))
    elif loss_type == "ipo_sum":
        losses = np.square(margins - 1.0 / (2.0 * beta))
    elif loss_type == "hinge":
        losses = np.maximum(0.0, 1.0 - beta * margins)
    else:
        right, wrong = _softplus(-beta * margins), _softplus(beta * margins)
        if loss_type == "robust":
            losses = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
        else:
            losses = (1 - label_smoothing) * right + label_smoothing * wrong
    return losses, beta * ratios


def simpo_losses(
    policy: PairTotals, beta: float, gamma: float, label_smoothing: float, has_means: bool
) -> tuple[Floats, Floats]:
    """Loss (N,) and rewards (N, 2) of each pair."""
    rewards = beta * (policy.means if has_means else policy.sums)
    margins = rewards[:, 0] - rewards[:, 1] - gamma
    return (1 - label_smoothing) * _softplus(-margins) + label_smoothing * _softplus(margins), rewards


def orpo_losses(policy: PairTotals, beta: float) -> tuple[Floats, Floats]:
    """Loss (N,), in which the likelihood of all pairs is that of each, and rewards (N, 2)."""
    means = np.minimum(policy.means, MAX_MEAN_LOG_PROB)
    log_odds = means - elementary.log(-elementary.expm1(means))
    return policy.nll + beta * _softplus(log_odds[:, 1] - log_odds[:, 0]), beta * policy.means


def reward_losses(rewards: Floats, margins: Floats, center_coefficient: float) -> Floats:
    """Loss (N,) of each pair, by the rewards of its texts (N, 2) and the margin (N,) between them in the data."""
    losses: Floats = _softplus(margins - (rewards[:, 0] - rewards[:, 1]))
    return losses + center_coefficient * np.square(rewards.sum(1))


def _softplus(x: Floats) -> Floats:
    """log(1 + exp(x))"""
    found: Floats = np.logaddexp(0.0, x)
    return found
