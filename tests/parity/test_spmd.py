# SPDX-License-Identifier: Apache-2.0
"""Training steps that `sporeloom.partition` shards equal one device."""

import json

import pytest
from conftest import call

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [("pangu", "tiny", []), ("pangu", "tiny", ["zero"]), ("pangu", "embedded_tiny", []), ("palm", "tiny", ["zero"])],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_dp2_tp2_equals_one_device(tmp_path, family, size, options):
    call("tests/parity/spmd_worker.py", "train", family, size, options, str(tmp_path / "out"), processes=4, fresh=True)
    for rank in range(4):
        found = json.loads((tmp_path / f"out.{rank}.json").read_text())
        for ours, one_device in zip(found["found"], found["expected"], strict=True):
            assert ours == pytest.approx(one_device, rel=1e-6)
        assert found["difference"] < 1e-6
        assert found["sharded_parameters"] > 8
        assert not found["unsharded"], found["unsharded"]
        assert not any("AllGather" in kind for kind in found["communications"]) or "zero" in options
