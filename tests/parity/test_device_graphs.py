# SPDX-License-Identifier: Apache-2.0
"""The backend of devices, `engine: spmd`, equals one device where stand-ins take the place of what communicates there."""

import numpy as np
import pytest
from conftest import call

WORKER = "tests/parity/device_worker.py"
ENGINE = {"rules": "decoder", "engine": "spmd"}
EXPERTS = {"experts": {"num_experts": 4, "experts_per_token": 2, "capacity_factor": 1.0}}
TWO_LAYERS = {"num_layers": 2}
CASES = {
    "dp2_tp2_zero": ({"mesh": {"dp": 2, "tp": 2}, "optimizer_parallel": {}}, TWO_LAYERS),
    "pp2_tp2": ({"mesh": {"pp": 2, "tp": 2}, "pipeline": {"num_microbatches": 3}}, TWO_LAYERS),
    "pp2_v_shaped": (
        {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 4, "schedule": "zero_bubble_v", "virtual_stages": 2}},
        {"num_layers": 4},
    ),
    "ep2_tp2": ({"mesh": {"dp": 2, "ep": 2, "tp": 2}, "rules": "experts"}, TWO_LAYERS | EXPERTS),
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_device(name, tmp_path):
    settings, changes = CASES[name]
    size = int(np.prod([degree for axis, degree in settings["mesh"].items() if axis != "ep"]))
    one = call(WORKER, "train", {"one_device": {}}, tmp_path, changes)["one_device"]
    told = call(WORKER, "train", {name: ENGINE | settings}, tmp_path, changes, processes=size)
    for rank in told:
        np.testing.assert_allclose([rank[name]["loss"], rank[name]["norm"]], [one["loss"], one["norm"]], rtol=1e-6)
    with np.load(tmp_path / "one_device.npz") as expected, np.load(tmp_path / f"{name}.npz") as got:
        largest = max(np.abs(expected[key]).max() for key in expected.files)
        assert set(got.files) == set(expected.files)
        for key in expected.files:  # the bias of keys has no gradient but rounding
            atol = 1e-5 * np.abs(expected[key]).max() + 1e-7 * largest
            np.testing.assert_allclose(got[key], expected[key], rtol=0, atol=atol, err_msg=key)


def test_every_rank_of_a_pipeline_knows_what_is_evaluated():
    settings = ENGINE | {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}}
    expected = call(WORKER, "evaluate", {}, TWO_LAYERS)
    assert call(WORKER, "evaluate", settings, TWO_LAYERS, processes=2) == pytest.approx([expected] * 2, rel=1e-6)
