# SPDX-License-Identifier: Apache-2.0
"""From rewards to advantages and loss weights, in float64: of single texts (PPO) and of groups of texts (GRPO).

Arrays are (B, T) over the tokens of texts, with a mask of those that were generated, or (B,) over texts.
Names and formulas are TRL's. Sources: GAE arXiv:1506.02438; GRPO arXiv:2402.03300; DAPO arXiv:2503.14476; Dr. GRPO
arXiv:2503.20783.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom.core import elementary

Floats = NDArray[np.floating[Any]]
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
Scale = Literal["group", "batch", "none"]
KL = Literal["k1", "k2", "k3"]


def group_advantages(rewards: Floats, group_size: int, scale: Scale = "group") -> NDArray[np.float64]:
    """Advantage of each text (B,) over the mean of its group, neighbours of `group_size`.

    `scale`: divided by the standard deviation + 1e-4 of the group, of the batch, or not at all.
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, group_size)
    centred = groups - groups.mean(1, keepdims=True)
    if scale == "group":
        centred /= (groups.std(1, ddof=1, keepdims=True) if group_size > 1 else 0.0) + 1e-4
    elif scale == "batch":
        centred /= (groups.std(ddof=1) if groups.size > 1 else 0.0) + 1e-4
    return centred.reshape(-1)


def leave_one_out_advantages(rewards: Floats, group_size: int, scale: Scale = "none") -> NDArray[np.float64]:
    """Advantage of each text (B,) over the mean of the other texts of its group, neighbours of `group_size`.

    `scale`: none, or batch: less the mean, divided by the standard deviation + 1e-4 of the batch.
    Source: RLOO arXiv:2402.14740.
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, group_size)
    others = (groups.sum(1, keepdims=True) - groups) / (group_size - 1)
    advantages = (groups - others).reshape(-1)
    if scale == "batch":
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-4)
    return advantages


def rewards_with_kl(
    rewards: Floats, log_probs: Floats, reference: Floats, mask: Floats, coefficient: float
) -> NDArray[np.float64]:
    """Rewards of texts (B,), less `coefficient` times their log-probability's excess over the reference's."""
    divergence = (np.asarray(log_probs, np.float64) - reference) * mask
    return np.asarray(rewards, np.float64) - coefficient * divergence.sum(1)


def token_weights(mask: Floats, loss_type: LossType, max_completion_length: int) -> NDArray[np.float64]:
    """Each token's weight in the loss: of the mean over texts of their means (grpo), over all tokens (bnpo, dapo, cispo),
    or of texts times the longest length (dr_grpo)."""
    mask = np.asarray(mask, np.float64)
    if loss_type == "grpo":
        return mask / np.maximum(mask.sum(1, keepdims=True), 1.0) / len(mask)
    if loss_type == "dr_grpo":
        return mask / (len(mask) * max_completion_length)
    return mask / max(mask.sum(), 1.0)


def overlong_penalties(lengths: Floats, max_completion_length: int, buffer: int) -> NDArray[np.float64]:
    """Penalty of each text (B,) of that many tokens (DAPO's soft overlong punishment).

    It is 0 up to `buffer` tokens before the maximum length, and falls to -1 there.
    """
    excess = np.asarray(lengths, np.float64) - (max_completion_length - buffer)
    return -np.clip(excess / buffer, 0.0, 1.0)


def has_contrast(rewards: Floats, group_size: int) -> NDArray[np.bool_]:
    """Whether the texts of each group, neighbours of `group_size`, differ in their rewards: others teach nothing."""
    groups = np.asarray(rewards, np.float64).reshape(-1, group_size)
    differs: NDArray[np.bool_] = (groups != groups[:, :1]).any(1)
    return differs


def kl_estimate(log_probs: Floats, reference: Floats, kind: KL) -> NDArray[np.float64]:
    """Divergence of a policy from its reference, at each token that the policy sampled."""
    difference = np.asarray(log_probs, np.float64) - reference
    if kind == "k1":
        return difference
    return difference**2 / 2 if kind == "k2" else elementary.exp(-difference) - 1 + difference


def token_rewards(scores: Floats, divergence: Floats, mask: Floats, kl_coef: float) -> NDArray[np.float64]:
    """Rewards of tokens: -kl_coef * divergence, and the score of a text (B,) at its last token."""
    rewards = -kl_coef * np.asarray(divergence, np.float64) * mask
    last = mask.shape[1] - 1 - np.argmax(np.asarray(mask)[:, ::-1] > 0, axis=1)
    has_any = np.asarray(mask).any(1)
    rewards[np.flatnonzero(has_any), last[has_any]] += np.asarray(scores, np.float64)[has_any]
    return rewards


def gae(rewards: Floats, values: Floats, mask: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns of each token; after a text's last token values are 0."""
    rewards, values, mask = (np.asarray(x, np.float64) for x in (rewards, values, mask))
    values, advantages = values * mask, np.zeros_like(rewards)
    following, later = np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        here = mask[:, t]
        advantages[:, t] = here * (delta + gamma * lam * later)
        later = np.where(here > 0, advantages[:, t], later)
        following = np.where(here > 0, values[:, t], following)
    return advantages, (advantages + values) * mask


def whitened(values: Floats, mask: Floats, keep_mean: bool = False) -> NDArray[np.float64]:
    """Normalize over the tokens of the mask: mean 0, or unchanged, and variance 1 (unbiased, + 1e-8); 0 elsewhere."""
    values, mask = np.asarray(values, np.float64), np.asarray(mask, np.float64)
    count = max(mask.sum(), 1.0)
    mean = (values * mask).sum() / count
    variance = (((values - mean) ** 2) * mask).sum() / max(count - 1, 1.0)
    return ((values - mean) / np.sqrt(variance + 1e-8) + (mean if keep_mean else 0.0)) * mask


class AdaptiveKL:
    """A coefficient that keeps the divergence near a target. Source: arXiv:1909.08593 section 2.2.

    Args:
        horizon: texts over which the coefficient follows.
    """

    def __init__(self, coefficient: float, target: float, horizon: int):
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def follow(self, divergence: float, num_texts: int) -> None:
        """Change the coefficient after `num_texts` texts whose divergences had this mean."""
        error = min(max(divergence / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_texts / self.horizon
