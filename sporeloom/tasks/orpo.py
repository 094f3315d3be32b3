# SPDX-License-Identifier: Apache-2.0
"""Odds ratio preference optimization: preferred texts are learned, and their odds over those of rejected ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.align.preferences import Floats, PairTotals, orpo_losses
from sporeloom.data.examples import Pair
from sporeloom.models.config import NO_LABEL
from sporeloom.nn.preferences import ORPO
from sporeloom.tasks.preference import ReferenceFreeTask


class ORPOTask(ReferenceFreeTask):
    """All tokens of preferred texts count in the likelihood, those of prompts included, as in TRL."""

    objective = ORPO
    flags = ("beta",)

    def loss(self) -> nn.Cell:
        return ORPO(self.config.beta)

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        batch = self.pair_batch(step)
        likelihood = (batch.labels != NO_LABEL).astype(np.float32)
        likelihood[1::2] = 0
        likelihood /= likelihood.sum()
        return [*batch._replace(loss_weights=batch.loss_weights / np.float32(self.config.batch_size)), likelihood]

    def pair_losses(self, pairs: Sequence[Pair], totals: PairTotals, content: str) -> tuple[Floats, Floats]:
        return orpo_losses(totals, self.config.beta)


TASK = ORPOTask
