# SPDX-License-Identifier: Apache-2.0
"""A reward model: one number for a text, higher for the one that is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.align.preferences import Floats, PairTotals, reward_losses
from sporeloom.data.batch import Batch
from sporeloom.data.examples import Example, Pair, ended_batch
from sporeloom.nn.objectives import PairwiseReward
from sporeloom.tasks.preference import PairTask, both


class Reward(PairTask):
    """The number at a text's last token is its reward."""

    objective = PairwiseReward
    new_weights = ("head.weight",)
    unused_weights = "mtp."

    def loss(self) -> nn.Cell:
        return PairwiseReward(self.config.center_rewards_coefficient)

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        pairs = self.drawn(step)
        batch = ended_batch(both(pairs), self.run.seq_len)
        margins = np.zeros_like(batch.loss_weights)
        margins[::2] = batch.loss_weights[::2] * np.asarray([[pair.margin] for pair in pairs], np.float32)
        return [*batch._replace(loss_weights=batch.loss_weights / np.float32(len(pairs))), margins]

    def rows(self, examples: Sequence[Example]) -> Batch:
        return ended_batch(examples, self.run.seq_len)

    def pair_losses(self, pairs: Sequence[Pair], totals: PairTotals, content: str) -> tuple[Floats, Floats]:
        margins = np.array([pair.margin for pair in pairs])
        return reward_losses(totals.sums, margins, self.config.center_rewards_coefficient), totals.sums


TASK = Reward
