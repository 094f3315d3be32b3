# SPDX-License-Identifier: Apache-2.0
"""Common parts of the tasks that train on pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.data.examples import Example, Pair, fitted_pairs
from sporeloom.errors import ConfigError
from sporeloom.nn.objectives import Objective
from sporeloom.tasks.tuning import Tuning


class PairTask(Tuning):
    """Two rows for each pair, the chosen text first."""

    pairs: list[Pair]
    objective: type[Objective]

    def open_data(self) -> None:
        pairs, is_scored = self.reading().pairs(self.run.data), self.config.trains_values
        found = fitted_pairs(pairs, self.run.seq_len, is_scored)
        if not found.examples:
            raise ConfigError(f"{self.config.data}: all pairs are longer than --seq-len {self.run.seq_len}")
        self.pairs, self.num_samples = found.examples, len(found.examples)
        self.text = found.describe("pairs")

    def drawn(self, step: int) -> list[Pair]:
        """The pairs of a step."""
        return [self.pairs[sample] for sample in self.samples(step)]

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        assert counts is not None
        return dict(zip(self.objective.metrics, map(float, counts), strict=True))


def both(pairs: Sequence[Pair]) -> list[Example]:
    """Their texts, two for each."""
    return [example for pair in pairs for example in (pair.chosen, pair.rejected)]
