# SPDX-License-Identifier: Apache-2.0
"""NaN that one request left in a cache reaches no other, on one device and on several."""

import pytest
from conftest import CONFIGS, call

WORKER = "tests/parity/nan_worker.py"
PROMPTS = [[20, 30, 40, 50, 60], [70, 80, 90]]
FAILED = ["BadLogitsError"] * 2
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", [None, "pangu_tiny_dp2", "pangu_tiny_pp2"])
def test_after_requests_that_failed_the_next_ones_get_what_they_get_anyway(checkpoint, strategy):
    if strategy:
        told = call(
            WORKER, "before_and_after", str(checkpoint), PROMPTS, str(CONFIGS / f"{strategy}.yaml"), processes=2
        )
        assert told[0] == told[1]
        first, spoiled, after = told[0]
    else:
        first, spoiled, after = call(WORKER, "before_and_after", str(checkpoint), PROMPTS)
    assert [len(tokens) for tokens in first] == [4, 4]
    assert (spoiled, after) == (FAILED, first)


def test_in_bfloat16_too(checkpoint):
    first, spoiled, after = call(
        WORKER, "before_and_after", str(checkpoint), PROMPTS, None, True, "bfloat16", fresh=True
    )
    assert (spoiled, after) == (FAILED, first)


def test_the_compiled_kernels_read_no_slot_that_is_hidden(checkpoint):
    first, spoiled, after = call(WORKER, "before_and_after", str(checkpoint), PROMPTS, None, False)
    assert first == spoiled == after
