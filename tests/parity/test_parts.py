# SPDX-License-Identifier: Apache-2.0
"""Under a mesh a network computes what one device does: operators that are another function on a part of their input, sums,
gradients of a user's own. Unequal inputs are refused on all ranks."""

import numpy as np
import pytest
from conftest import call

WORKER = "tests/parity/parts.py"
NAMES = [
    *(f"{what}, tp" for what in ("cube", "written_out_gelu", "rms_norm", "residual", "addn", "held_add_n")),
    *(f"{what}, tp" for what in ("made_add_n", "made_add_n_of_three")),
    *(
        f"{what}, rows"
        for what in ("cubed_sum", "batch_norm_by_what_is_given", "divergence", "largest_rows", "one_norm")
    ),
    *(f"{what}, rows" for what in ("argmax_of_rows", "logcumsumexp", "variance", "median", "segment_max", "scatter")),
    *(f"{what}, columns" for what in ("amax_of_rows", "batch_norm_by_what_is_given", "segment_sum", "largest_rows")),
    *(f"{what}, columns" for what in ("argmin_with_value", "argmax_of_columns", "median", "as_many_as_are_positive")),
    "as_many_as_are_positive, rows",
    "batch_norm, rows",
    *(f"{operator} kept whole, rows" for operator in ("largest", "summed", "added")),
    *(f"{gradient}, rows" for gradient in ("ThroughSign", "CentredGradient", "MeanGradient")),
    *("clipping, momentum", "clipping, Adam"),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_device():
    return call(WORKER, "outcomes", [*NAMES, "value_and_grad", "evaluated first"])


@pytest.fixture(scope="module")
def two_ranks():
    return call(WORKER, "outcomes", NAMES, processes=2)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_one_device(name, one_device, two_ranks):
    for told in two_ranks:
        assert not isinstance(told[name], str), told[name]
        np.testing.assert_allclose(told[name], one_device[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["its own rows", "shuffled otherwise", "an uneven batch on one"])
def test_ranks_that_are_given_other_inputs_say_so(what):
    message = "was given other values than rank 0 as argument 1"
    message = "a batch of 7 rows is not divisible by dp 2" if "uneven" in what else message
    for told in call(WORKER, "fed", what, processes=2):
        assert message in told


def test_the_same_inputs_are_welcome():
    assert call(WORKER, "fed", "the same", processes=2) == [2, 2]


FAULTS = ["a sum over ranks is left out", "a sum over ranks is taken twice"]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_check_compares_loss_gradients_and_step_with_one_device(fault, one_device):
    cases = ["rms_norm, tp", "value_and_grad", *(() if fault else ("clipping, Adam", "evaluated first"))]
    for told in call(WORKER, "checked", cases, fault, processes=2):
        for name in cases:
            if fault is None:
                np.testing.assert_allclose(told[name], one_device[name], rtol=2e-5, atol=1e-6, err_msg=name)
            else:
                assert "this is not what one device computes" in told[name]
                assert "gradient of " in told[name] and " instead of " in told[name]
