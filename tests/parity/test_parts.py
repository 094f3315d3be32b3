# SPDX-License-Identifier: Apache-2.0
"""Under a mesh a network computes what one device does, or is refused on all ranks: operators that are another function on a
part of their input, sums that MindSpore's compiler rewrites, gradients of a user's own, unequal inputs."""

import numpy as np
import pytest
from conftest import call

WORKER = "tests/parity/parts.py"
REWRITTEN = "MindSpore multiplies and adds up the other terms, too"
ANOTHER = "on parts it is another function"
OWN_GRADIENT = "sees the rows of its rank alone"
REFUSED = {
    "made_add_n, tp": REWRITTEN,
    "made_add_n_of_three, tp": "MindSpore cannot partition the network",
    "argmax_of_rows, rows": f"Argmax of the training step is sharded into [[2, 1]], and {ANOTHER}",
    "argmax_of_columns, columns": ANOTHER,
    "argmin_with_value, rows": ANOTHER,
    "logcumsumexp, rows": ANOTHER,
    "logcumsumexp, columns": ANOTHER,  # what MindSpore does not know it shards by rows, whatever lies otherwise
    "batch_norm, rows": "use nn.BatchNorm1d, nn.BatchNorm2d; or hold it as an attribute, self.NAME = ops.BatchNorm(...)",
    "variance, rows": ANOTHER,
    "variance, columns": ANOTHER,
    "one_norm, rows": ANOTHER,
    "one_norm, columns": ANOTHER,
    "median, rows": ANOTHER,
    "median, columns": ANOTHER,
    "segment_max, rows": ANOTHER,
    "scatter, rows": ANOTHER,
    "as_many_as_are_positive, rows": "gives a tensor whose shape depends on the data",
    "as_many_as_are_positive, columns": "gives a tensor whose shape depends on the data",
    "CentredGradient, rows": f"CentredGradient.bprop {OWN_GRADIENT}",
    "MeanGradient, rows": f"MeanGradient.bprop {OWN_GRADIENT}",
}
EQUAL = [
    *(f"{what}, tp" for what in ("cube", "written_out_gelu", "rms_norm", "residual", "addn", "held_add_n")),
    *(f"cubed_sum, {layout}" for layout in ("rows", "columns")),
    *(f"batch_norm_by_what_is_given, {layout}" for layout in ("rows", "columns")),
    *(f"amax_of_rows, {layout}" for layout in ("rows", "columns")),
    *(f"segment_sum, {layout}" for layout in ("rows", "columns")),
    *(f"divergence, {layout}" for layout in ("rows", "columns")),
    *(f"largest_rows, {layout}" for layout in ("rows", "columns")),
    "argmax_of_rows, columns",
    "argmax_of_columns, rows",
    "argmin_with_value, columns",
    "segment_max, columns",
    "scatter, columns",
    *(f"{operator} kept whole, rows" for operator in ("largest", "summed", "added")),
    "ThroughSign, rows",
    "clipping, momentum",
    "clipping, Adam",
]
OF_OUR_OWN = [*EQUAL, *REFUSED]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_device():
    return call(WORKER, "outcomes", [*OF_OUR_OWN, "value_and_grad", "evaluated first"])


@pytest.fixture(scope="module")
def two_ranks():
    """By MindSpore's partitioner."""
    return call(WORKER, "outcomes", [*REFUSED, *EQUAL], "mindspore", processes=2)


@pytest.fixture(scope="module")
def of_our_own():
    return call(WORKER, "outcomes", OF_OUR_OWN, "spmd", processes=2)


@pytest.mark.parametrize("name", EQUAL)
def test_it_trains_as_one_device(name, one_device, two_ranks):
    check(name, one_device, two_ranks)


@pytest.mark.parametrize("name", OF_OUR_OWN)
def test_our_own_partitioner_takes_what_mindspores_cannot(name, one_device, of_our_own):
    check(name, one_device, of_our_own)


def check(name, one_device, ranks):
    for told in ranks:
        assert not isinstance(told[name], str), told[name]
        np.testing.assert_allclose(told[name], one_device[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_on_all_ranks(name, two_ranks):
    for told in two_ranks:
        assert REFUSED[name] in str(told[name]), told[name]


@pytest.mark.parametrize("what", ["its own rows", "shuffled otherwise", "an uneven batch on one"])
def test_ranks_that_are_given_other_inputs_say_so(what):
    message = "was given other values than rank 0 as argument 1"
    message = "a batch of 7 rows is not divisible by dp 2" if "uneven" in what else message
    for told in call(WORKER, "fed", what, processes=2):
        assert message in told


def test_the_same_inputs_are_welcome():
    assert call(WORKER, "fed", "the same", processes=2) == [2, 2]


@pytest.mark.parametrize("fault", [None, "sums", "rows"])
def test_a_check_compares_loss_gradients_and_step_with_one_device(fault, one_device):
    """`sums`: MindSpore's pass and nothing that looks for what it did; `rows`: a mean of each rank's own rows."""
    cases = {
        None: ["rms_norm, tp", "clipping, Adam", "value_and_grad", "evaluated first"],
        "sums": ["rms_norm, tp", "value_and_grad"],
        "rows": ["variance, rows"],
    }[fault]
    for told in call(WORKER, "checked", cases, fault, processes=2):
        for name in cases:
            if fault is None:
                np.testing.assert_allclose(told[name], one_device[name], rtol=2e-5, atol=1e-6, err_msg=name)
            else:
                assert "this is not what one device computes" in told[name]
                assert "gradient of " in told[name] and " instead of " in told[name]
