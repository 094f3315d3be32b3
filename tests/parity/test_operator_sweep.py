# SPDX-License-Identifier: Apache-2.0
"""Operators in layouts, forward and backward: equal to one device or refused.

`benchmarks/operators.py` tries all functions in all layouts; here each group of them meets one, on two ranks or four.
"""

import math

import pytest
from conftest import call

WORKER = "tests/parity/operator_sweep.py"
REFUSED = {"index_add": "leave that parameter unsharded"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told():
    """{scheme: {function: outcome}} of each group."""
    return call(WORKER, "deterministic_part", timeout=580)


def test_every_layout_is_met(told):
    assert len(told["outcomes"]) > len({scheme for group in told["outcomes"] for scheme in group}) == 8
    assert sum(len(of) for group in told["outcomes"] for of in group.values()) >= 200


def test_none_is_wrong(told):
    outcomes = [(*each, scheme) for group in told["outcomes"] for scheme, of in group.items() for each in of.items()]
    refused = {name: said for name, said, _ in outcomes if isinstance(said, str)}
    assert refused.keys() <= REFUSED.keys() and all(REFUSED[name] in said for name, said in refused.items()), refused
    wrong = [each for each in outcomes if not isinstance(each[1], str) and not each[1][0] < told["close"]]
    assert not wrong and math.isfinite(told["close"])
