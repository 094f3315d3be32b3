# SPDX-License-Identifier: Apache-2.0
"""The heart: PanGu and CodeGeeX tiny on 4 real processes under msrun equals one device, whatever the strategy.

Losses of five steps within 1e-5 relative; the first step's gradients within 1e-5 of the model's largest gradient entry;
weights after five steps of plain SGD within 1e-5. Adam's weights are judged by the losses they give: it amplifies pure
rounding where the true gradient is zero, as for the key bias.
"""

import json

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, msrun, run

WORKER = ROOT / "tests" / "parity" / "worker.py"
CASES = [
    "pangu_tiny_dp4",
    "pangu_tiny_dp4_zero",
    "pangu_tiny_dp2_tp2",
    "pangu_tiny_dp2_tp2_zero",
    "pangu_tiny_tp4",
    "pangu_tiny_tp2_pp2",
    "pangu_tiny_tp2_pp2_recompute",
    "pangu_tiny_pp4",
    "pangu_tiny_dp2_pp2",
    "pangu_tiny_dp2_pp2_zero",
    "pangu_tiny_dp2_tp2_sp",
    "pangu_tiny_dp2_tp2_zero+clip",
    "pangu_tiny_tp2_pp2+clip",
    "pangu_tiny_dp2_pp2_zero+clip",
    "pangu_tiny_dp2_tp2_zero+accumulate",
    "pangu_tiny_dp2_pp2+after_query",
]
DROPOUT_CASES = [
    "pangu_tiny_tp2_pp2_recompute",
    "pangu_tiny_tp2_pp2_selective",
    "pangu_tiny_dp2_tp2_sp",
    "pangu_tiny_dp2_tp2_zero+accumulate",
]
CODEGEEX_CASES = [
    f"{case}+codegeex" + ("" if "pp4" in case else "+shallow") for case in CASES if not case.endswith("+after_query")
]
# Two layers compile in half the time; options that do not concern layers need no more.
CASES = [f"{case}+shallow" if case.endswith(("+clip", "+accumulate")) else case for case in CASES]
CASES += CODEGEEX_CASES + [f"{case}+dropout+shallow" for case in DROPOUT_CASES]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def options_of(case):
    return "".join("+" + option for option in case.split("+")[1:] if option != "accumulate")


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Runs all cases in one job of 4 processes, and one device's beside it. Returns case, optimizer -> (numbers, tensors)."""
    out = tmp_path_factory.mktemp("parity")
    references = sorted({"one_device" + options_of(case) for case in CASES} | {"one_device+accumulate"})
    single = run(WORKER, out, *references, timeout=600)
    assert single.code == 0, single.output
    paths = [str(CONFIGS / (case.replace("+", ".yaml+", 1) if "+" in case else case + ".yaml")) for case in CASES]
    parallel = msrun(4, out / "logs", WORKER, out, *paths, timeout=1700)
    assert parallel.code == 0, parallel.output[-4000:]

    def load(label, optimizer):
        numbers = json.loads((out / f"{label}.{optimizer}.json").read_text())
        with np.load(out / f"{label}.{optimizer}.npz") as archive:
            return numbers, {name: archive[name] for name in archive.files}

    return load


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_losses_and_gradient_norms_of_five_steps(results, case, optimizer):
    got, _ = results(case, optimizer)
    expected, _ = results("one_device" + options_of(case), optimizer)
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(got["norms"], expected["norms"], rtol=1e-4)
    assert expected["losses"][-1] != expected["losses"][0]


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_first_step(results, case):
    got, expected = results(case, "AdamW")[1], results("one_device" + options_of(case), "AdamW")[1]
    largest = max(np.abs(value).max() for value in expected.values())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(got[name] - value).max() <= 1e-5 * largest, name


@pytest.mark.parametrize("case", CASES)
def test_weights_after_five_steps_of_sgd(results, case):
    got, expected = results(case, "SGD")[1], results("one_device" + options_of(case), "SGD")[1]
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_accumulating_on_one_device_equals_the_whole_batch(results):
    for optimizer in ("AdamW", "SGD"):
        got, expected = results("one_device+accumulate", optimizer), results("one_device", optimizer)
        np.testing.assert_allclose(got[0]["losses"], expected[0]["losses"], rtol=1e-5)


def test_clipping_was_active(results):
    numbers, _ = results("one_device+clip+shallow", "SGD")
    assert min(numbers["norms"]) > 0.5
    unclipped, _ = results("one_device+shallow", "SGD")
    assert abs(numbers["losses"][-1] - unclipped["losses"][-1]) > 1e-3
