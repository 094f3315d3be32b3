# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts: the states of their tokens pooled to one vector of length 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom.inference.sampling import BadLogitsError

Pooling = Literal["last", "mean"]
"""The state of the last token, which alone has seen the full text; or the mean of all."""


@dataclass
class PooledStates:
    """The states of a text so far. What they are pooled to depends on no cut of the text into parts: they are added one after
    the other, in float64."""

    pooling: Pooling
    total: NDArray[np.float64] | None = None
    count: int = 0

    def add(self, states: NDArray[np.float32]) -> None:
        """Add the states (T, D) of the next tokens."""
        for state in states if self.pooling == "mean" else states[-1:]:
            kept = self.total is not None and self.pooling == "mean"
            self.total = self.total + state if kept else state.astype(np.float64)
        self.count = self.count + len(states) if self.pooling == "mean" else 1

    def vector(self) -> NDArray[np.float32]:
        """The embedding (D,), of length 1.

        Raises:
            BadLogitsError: a state that is not finite.
        """
        assert self.total is not None
        vector = self.total / self.count
        length = np.sqrt((vector * vector).sum())
        if not np.isfinite(length) or length == 0:
            raise BadLogitsError
        result: NDArray[np.float32] = (vector / length).astype(np.float32)
        return result
