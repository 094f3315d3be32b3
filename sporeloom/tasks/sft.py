# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: completions and assistant messages are trained on, prompts are only context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.data.examples import Example, example_batch, fitted, packed
from sporeloom.tasks.tuning import Tuning


class SFT(Tuning):
    """Every trained token of a batch has the same weight in the loss, in whatever row it is."""

    rows: list[list[Example]]

    def open_data(self) -> None:
        seq_len = self.run.seq_len
        reading = self.reading(self.config.train_on == "everything")
        found = fitted(reading.examples(self.run.data), seq_len)
        if not found.examples:
            raise ConfigError(f"{self.config.data}: all prompts are longer than --seq-len {seq_len}: nothing to learn")
        places = packed(found.examples, seq_len) if self.config.packing else [[n] for n in range(len(found.examples))]
        self.rows = [[found.examples[place] for place in row] for row in places]
        self.num_samples = len(self.rows)
        learned = sum(sum(example.learned[1:]) for example in found.examples)
        self.text = f"{found.describe('examples')} in {len(self.rows):,} sequences, {learned:,} tokens to learn"

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
