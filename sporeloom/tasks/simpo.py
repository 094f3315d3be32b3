# SPDX-License-Identifier: Apache-2.0
"""Simple preference optimization: preferred texts become more likely than rejected ones, by their tokens' mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.align.preferences import Floats, PairTotals, simpo_losses
from sporeloom.data.examples import Pair
from sporeloom.nn.preferences import SimPO
from sporeloom.tasks.preference import ReferenceFreeTask


class SimPOTask(ReferenceFreeTask):
    objective = SimPO
    flags = ("beta", "gamma", "label_smoothing", "length_normalization")

    def loss(self) -> nn.Cell:
        config = self.config
        return SimPO(config.beta, config.gamma, config.label_smoothing, config.length_normalization)

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        batch = self.pair_batch(step)
        return [*batch._replace(loss_weights=batch.loss_weights / np.float32(self.config.batch_size))]

    def pair_losses(self, pairs: Sequence[Pair], totals: PairTotals, content: str) -> tuple[Floats, Floats]:
        config = self.config
        return simpo_losses(totals, config.beta, config.gamma, config.label_smoothing, config.length_normalization)


TASK = SimPOTask
