# SPDX-License-Identifier: Apache-2.0
"""QK-clip and the largest attention logits on every mesh, of all microbatches, are those of one device."""

import json

import numpy as np
import pytest
from conftest import CONFIGS, call

WORKER = "tests/parity/worker.py"
CASES = [
    "pangu_tiny_dp2_tp2_sp+latent+adamw",  # multi-token prediction, too
    "pangu_tiny_dp2_pp2+pangu+adamw",  # a top query layer in the last stage
    "pangu_tiny_cp2_tp2+codegeex4+adamw",  # grouped queries
    "pangu_tiny_dp2_tp2_zero+codegeex4+muon+accumulate",
    "one_device+pangu+adamw+accumulate",
]
IN_SHORT = CASES[:1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out, done = tmp_path_factory.mktemp("qk_clip"), set()

    def load(strategy, *options):
        case = "+".join([strategy, *options])
        if case not in done:
            path = strategy if strategy == "one_device" else CONFIGS / f"{strategy}.yaml"
            processes = 1 if strategy == "one_device" else 4
            call(WORKER, "train_optimizer", path, ["qk_clip", *options], out / case, processes=processes)
            done.add(case)
        return json.loads((out / f"{case}.json").read_text()), dict(np.load(out / f"{case}.npz"))

    return load


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in IN_SHORT else [pytest.mark.long]) for c in CASES])
def test_a_mesh_equals_one_device(results, case):
    strategy, *options = case.split("+")
    got, weights = results(strategy, *options)
    expected, expected_weights = results("one_device", *(option for option in options if option != "accumulate"))
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=1e-5)
    counts = np.array(expected["counts"]).reshape(len(expected["losses"]), -1, 3)
    np.testing.assert_allclose(np.array(got["counts"]).reshape(counts.shape), counts, rtol=2e-5, atol=1e-6)
    clipped = counts[..., 2]
    assert clipped.any()
    assert (clipped < clipped.max()).any()  # not all heads of all layers
    assert weights.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-5, err_msg=name)
