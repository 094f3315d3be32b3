# SPDX-License-Identifier: Apache-2.0
"""Embeddings of states: one formula, whatever parts they come in."""

import numpy as np
import pytest

from sporeloom.inference.pooling import PooledStates
from sporeloom.inference.sampling import BadLogitsError

STATES = np.random.default_rng(0).normal(size=(23, 16)).astype(np.float32)
CUTS = ([], [1], [7, 8, 20], list(range(1, 23)))


def embedding(parts, pooling):
    pooled = PooledStates(pooling)
    for part in parts:
        pooled.add(part)
    return pooled.vector()


@pytest.mark.parametrize("cuts", CUTS)
def test_the_vector_is_that_of_the_formula_to_the_bit_for_all_parts(cuts):
    exact = STATES.astype(np.float64)
    for pooling, vector in (("last", exact[-1]), ("mean", exact.sum(0) / 23)):
        found = embedding(np.split(STATES, cuts), pooling)
        assert found.dtype == np.float32 and found.tobytes() == embedding([STATES], pooling).tobytes()
        np.testing.assert_allclose(found, vector / np.linalg.norm(vector), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_states_that_have_no_direction_are_refused(value):
    with pytest.raises(BadLogitsError):
        embedding([np.full((2, 4), value, np.float32)], "mean")
