# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: completions and assistant messages are trained on, prompts are only context."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import Batch
from sporeloom.data.examples import Example, FittingExamples, Line, LineTokenizer, example_batch, fitted, packed
from sporeloom.tasks.tuning import Tuning, batches_of, lines_hash
from sporeloom.train.tuning import open_reading
from sporeloom.train.validation import HeldOut, TokenLosses, TokenSet


class SFT(Tuning):
    """Every trained token of a batch has the same weight in the loss, in whatever row it is."""

    rows: list[list[Example]]

    def open_data(self) -> None:
        reading = self.reading(self.config.train_on == "everything")
        self.rows, found = self._rows(reading, self.config.data, self.run.data)
        self.num_samples = len(self.rows)
        learned = sum(sum(example.learned[1:]) for example in found.examples)
        self.text = f"{found.describe('examples')} in {len(self.rows):,} sequences, {learned:,} tokens to learn"

    def _rows(
        self, reading: LineTokenizer, path: Path, lines: Sequence[Line]
    ) -> tuple[list[list[Example]], FittingExamples]:
        """The examples of lines in rows of a batch, and how they fit.

        Raises:
            ConfigError: nothing is left to learn.
        """
        found = fitted(reading.examples(lines), self.run.seq_len)
        if not found.examples:
            raise ConfigError(f"{path}: all prompts are longer than --seq-len {self.run.seq_len}: nothing to learn")
        numbers = range(len(found.examples))
        places = packed(found.examples, self.run.seq_len) if self.config.packing else [[number] for number in numbers]
        return [[found.examples[place] for place in row] for row in places], found

    def validation_sets(self, net: nn.Cell) -> Mapping[str, HeldOut]:
        sets = self.held_out_lines()
        if not sets:
            return {}
        losses = TokenLosses(self.run, self.engine, net)
        reading, found = open_reading(self.run, self.tokenizer, self.config.train_on == "everything"), {}
        for name, (path, lines) in sets.items():
            rows, _ = self._rows(reading, path, lines)
            found[name] = TokenSet(losses, functools.partial(self._batches, rows), lines_hash(lines))
        return found

    def _batches(self, rows: Sequence[list[Example]]) -> Iterator[Batch]:
        """Rows in batches, whose loss weights are a mask; rows that fill the last one up do not count."""
        make = functools.partial(example_batch, seq_len=self.run.seq_len)
        for num_real, batch in batches_of(rows, self.config.batch_size, make):
            batch.loss_weights[num_real:] = 0
            yield batch

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        batch = example_batch([self.rows[sample] for sample in self.samples(step)], self.run.seq_len)
        return batch._replace(loss_weights=shared_evenly(batch.loss_weights))

    def data_state(self) -> dict[str, Any]:
        return {**super().data_state(), "packing": self.config.packing, "train_on": self.config.train_on}


def shared_evenly(mask: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide a mask by its sum."""
    shares: NDArray[np.float32] = (mask / max(float(mask.sum(dtype=np.float64)), 1.0)).astype(np.float32)
    return shares


TASK = SFT
