# SPDX-License-Identifier: Apache-2.0
"""Common parts of the tasks that train on pairs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.align.preferences import Floats, PairTotals
from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import Batch
from sporeloom.data.examples import Example, FittingExamples, Line, LineTokenizer, Pair, example_batch, fitted_pairs
from sporeloom.models.config import NO_LABEL
from sporeloom.nn.objectives import Objective
from sporeloom.tasks.tuning import Tuning, batches_of, lines_hash
from sporeloom.train.tuning import open_reading
from sporeloom.train.validation import HeldOut


class PairTask(Tuning):
    """Two rows for each pair, the chosen text first."""

    pairs: list[Pair]
    objective: type[Objective]
    flags: tuple[str, ...] = ()
    """Flags of the configuration that graphs and resumed runs depend on."""
    sets: dict[str, PairSet]
    """Validation sets by name."""

    def data_state(self) -> dict[str, Any]:
        return {**super().data_state(), **self._flag_values()}

    def _flag_values(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in self.flags}

    def open_data(self) -> None:
        found = self._fitted(self.reading(), self.config.data, self.run.data)
        self.pairs, self.num_samples = found.examples, len(found.examples)
        self.text = found.describe("pairs")

    def _fitted(self, reading: LineTokenizer, path: Path, lines: Sequence[Line]) -> FittingExamples:
        """Raises:
        ConfigError: no pair is short enough.
        """
        found = fitted_pairs(reading.pairs(lines), self.run.seq_len, self.config.trains_values)
        if not found.examples:
            raise ConfigError(f"{path}: all pairs are longer than --seq-len {self.run.seq_len}")
        return found

    def validation_sets(self, net: nn.Cell) -> Mapping[str, HeldOut]:
        reading, self.sets = open_reading(self.run, self.tokenizer), {}
        for name, (path, lines) in self.held_out_lines().items():
            self.sets[name] = PairSet(self, self._fitted(reading, path, lines).examples, lines_hash(lines))
        return self.sets

    def rows(self, examples: Sequence[Example]) -> Batch:
        """Texts in rows, with a mask of the tokens whose values count."""
        return example_batch([[example] for example in examples], self.run.seq_len)

    def totals(self, pairs: Sequence[Pair]) -> PairTotals:
        """Log-probabilities or rewards of the texts of pairs by the present weights, on all ranks."""
        sums, lengths, likelihoods, num_labels = [], [], 0.0, 0
        for real, batch in batches_of(both(pairs), 2 * self.config.batch_size, self.rows):
            values = self.evaluated(self.net, batch).astype(np.float64)
            sums.append((values * batch.loss_weights).sum(1)[:real])
            lengths.append(batch.loss_weights.sum(1, dtype=np.float64)[:real])
            labels = batch.labels[:real:2] != NO_LABEL
            likelihoods, num_labels = likelihoods + values[:real:2][labels].sum(), num_labels + labels.sum()
        nll = -float(likelihoods / max(num_labels, 1))
        return PairTotals(np.concatenate(sums).reshape(-1, 2), np.concatenate(lengths).reshape(-1, 2), nll)

    @abstractmethod
    def pair_losses(self, pairs: Sequence[Pair], totals: PairTotals, content: str) -> tuple[Floats, Floats]:
        """Losses (N,) and rewards (N, 2) of the pairs of the validation set `content`."""

    def drawn(self, step: int) -> list[Pair]:
        """The pairs of a step."""
        return [self.pairs[sample] for sample in self.samples(step)]

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        assert counts is not None
        return dict(zip(self.objective.metrics, map(float, counts), strict=True))


class ReferenceFreeTask(PairTask):
    """Pairs that are compared by the trained model alone."""

    def pair_batch(self, step: int) -> Batch:
        """The texts of a step, with a mask for weights."""
        return example_batch([[example] for example in both(self.drawn(step))], self.run.seq_len)


@dataclass(frozen=True)
class PairSet:
    """A validation set of pairs: their mean loss, and how their rewards differ."""

    task: PairTask
    pairs: Sequence[Pair]
    content: str

    def metrics(self) -> dict[str, float]:
        losses, rewards = self.task.pair_losses(self.pairs, self.task.totals(self.pairs), self.content)
        margins = rewards[:, 0] - rewards[:, 1]
        return {
            "loss": float(losses.mean()),
            "rewards/margins": float(margins.mean()),
            "rewards/accuracies": float((margins > 0).mean()),
        }


def both(pairs: Sequence[Pair]) -> list[Example]:
    """Their texts, two for each."""
    return [example for pair in pairs for example in (pair.chosen, pair.rejected)]
