# SPDX-License-Identifier: Apache-2.0
"""Common parts of the tasks that train on pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import Batch
from sporeloom.data.examples import Example, Pair, example_batch, fitted_pairs
from sporeloom.nn.objectives import Objective
from sporeloom.tasks.tuning import Tuning


class PairTask(Tuning):
    """Two rows for each pair, the chosen text first."""

    pairs: list[Pair]
    objective: type[Objective]
    flags: tuple[str, ...] = ()
    """Flags of the configuration that graphs and resumed runs depend on."""

    def graph_key(self) -> dict[str, Any]:
        return {**super().graph_key(), **self._flag_values()}

    def data_state(self) -> dict[str, Any]:
        return {**super().data_state(), **self._flag_values()}

    def _flag_values(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in self.flags}

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


class ReferenceFreeTask(PairTask):
    """Pairs that are compared by the trained model alone."""

    def pair_batch(self, step: int) -> Batch:
        """The texts of a step, with a mask for weights."""
        return example_batch([[example] for example in both(self.drawn(step))], self.run.seq_len)


def both(pairs: Sequence[Pair]) -> list[Example]:
    """Their texts, two for each."""
    return [example for pair in pairs for example in (pair.chosen, pair.rejected)]
