# SPDX-License-Identifier: Apache-2.0
"""Kahneman-Tversky optimization: texts that are desired become more likely, others less, compared with the initial model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import Batch
from sporeloom.data.examples import Example, Line, Pair, example_batch, fitted_pairs
from sporeloom.nn.preferences import KTO
from sporeloom.tasks.dpo import DPO
from sporeloom.tasks.tuning import batches_of


class KTOTask(DPO):
    """A line's text comes with a mismatched one, the same prompt with the next line's text: their divergence from the
    reference, a mean over the batch, is subtracted from rewards. The reference log-probabilities of both are stored.

    `pairs` holds a text and its mismatched one.
    """

    objective = KTO
    flags = ("beta", "loss_type", "desirable_weight", "undesirable_weight")
    is_ahead = False

    def loss(self) -> nn.Cell:
        config = self.config
        return KTO(config.beta, config.desirable_weight, config.undesirable_weight, config.loss_type)

    def open_data(self) -> None:
        lines, reading = self.run.data, self.reading()
        following = [*lines[1:], *lines[:1]]
        mismatched = [
            Line(line.place, {**line.values, "completion": other.values["completion"]})
            for line, other in zip(lines, following, strict=True)
        ]
        labels = [float(line.values["label"]) for line in lines]
        texts, others = reading.examples(lines), reading.examples(mismatched)
        # The margin carries the label.
        pairs = [Pair(text, other, label) for text, other, label in zip(texts, others, labels, strict=True)]
        found = fitted_pairs(pairs, self.run.seq_len, False)
        if not found.examples:
            raise ConfigError(f"{self.config.data}: all texts are longer than --seq-len {self.run.seq_len}")
        self.pairs, self.num_samples = found.examples, len(found.examples)
        self.text = found.describe("texts")

    def shaped_inputs(self, step: int) -> list[NDArray[Any]]:
        return self.with_dropout_keys(step, self._arrays(step, 0.0))

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        return self._arrays(step, self._divergence(step) if self.config.loss_type == "kto" else 0.0)

    def _arrays(self, step: int, divergence: float) -> list[NDArray[Any]]:
        drawn, rows = self.drawn(step), self.config.batch_size
        batch = self._batch([pair.chosen for pair in drawn])
        mask = batch.loss_weights
        desired = mask * np.array([pair.margin for pair in drawn], np.float32)[:, None]
        reference = self.at_first(mask, self.known(step)[:, 0])
        return [
            *batch._replace(loss_weights=mask / np.float32(rows)),
            reference,
            desired,
            mask * np.float32(divergence),
        ]

    def _divergence(self, step: int) -> float:
        """Mean over the batch of log p - log reference p of mismatched texts under the present weights, at least 0."""
        self.engine.refresh(self.net, self.net.parallel_report)
        texts = [pair.rejected for pair in self.drawn(step)]
        sums = [
            (self.evaluated(self.net, batch) * batch.loss_weights).sum(1)[:real]
            for real, batch in batches_of(texts, self.config.batch_size, self._batch)
        ]
        return max(0.0, float((np.concatenate(sums) - self.known(step)[:, 1]).mean()))

    def _batch(self, texts: Sequence[Example]) -> Batch:
        return example_batch([[text] for text in texts], self.run.seq_len)


TASK = KTOTask
