# SPDX-License-Identifier: Apache-2.0
"""The first step of training beside one device notices a fault of the partitioner; all: benchmarks/planted_faults.py."""

import pytest
from conftest import call

WORKER = "tests/parity/planted_faults.py"
SOME = [
    "a sum over the wrong group",
    "axes of a dim in the order of the mesh, whatever the layout says",
    "a copy is taken for one that is sharded otherwise, of the same shape",
    "a sum is taken after Square",
    "rows looked up on their own rank are not pending",
    "statistics of a batch are of a rank's own rows",
]

pytestmark = pytest.mark.slow


def test_what_is_right_is_found_right_and_what_is_wrong_is_not():
    """Of two networks that update their weights and are computed once more, all in one graph."""
    right, *wrong = call(WORKER, "noticed", SOME)
    assert right == [False, False]
    assert wrong == [[True, True]] * len(SOME)
