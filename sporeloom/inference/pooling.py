# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts: the states of their tokens pooled to one vector of length 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom.inference.sampling import BadLogitsError

Pooling = Literal["last", "mean"]
"""The state of the last token, which alone has seen the full text; or the mean of all."""


def embedding(states: Sequence[NDArray[np.float32]], pooling: Pooling) -> NDArray[np.float32]:
    """Pool the states (T, D) of a text, which may come in parts, to a vector (D,) of length 1.

    The sums are in float64 over all tokens at once, so that the parts make no difference.

    Raises:
        BadLogitsError: a state that is not finite.
    """
    rows = np.concatenate(states).astype(np.float64)
    vector = rows[-1] if pooling == "last" else rows.mean(0)
    length = np.sqrt((vector * vector).sum())
    if not np.isfinite(length) or length == 0:
        raise BadLogitsError
    result: NDArray[np.float32] = (vector / length).astype(np.float32)
    return result
