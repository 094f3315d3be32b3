# SPDX-License-Identifier: Apache-2.0
"""Runs with parameter groups: the same on every mesh, frozen weights stay, a resumed run has the same groups."""

import json

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, fewer_microbatches, tool
from safetensors.numpy import load_file

from sporeloom.strategy.loader import load_strategy

pytestmark = pytest.mark.slow

# Epsilon as in resume_worker: rounding must not decide a step.
FLAGS = (
    "--steps",
    4,
    "--seq-len",
    32,
    "--batch-size",
    4,
    "--config",
    TWO_LAYERS,
    "--adam-epsilon",
    1e-5,
    "--warmup-steps",
    0,
)
GROUPS = """parameter_groups:
  - {match: "*.bias", weight_decay: 0.5}
  - {match: "embedding.*", learning_rate_factor: 0.1}
  - {match: "layers.0.*", freeze: true}
"""


def trained(out, *flags, processes=1):
    data = ("--data", ROOT / "examples" / "small_town.txt", "--output-dir", out)
    outcome = tool("tools/train.py", *data, *FLAGS, *flags, processes=processes)
    assert outcome.code == 0, outcome.output
    return load_file(out / "checkpoint" / "model.safetensors")


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups") / "groups.yaml"
    path.write_text(GROUPS)
    return path


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [("adamw", "pp2"), ("adafactor", "dp2_tp2_zero")],
)
def test_a_mesh_equals_one_device(groups, optimizer, name, tmp_path):
    flags = ("--optimizer", optimizer, "--parameter-groups", groups, "--steps", 3)
    one = trained(tmp_path / "one", *flags)
    strategy = fewer_microbatches(CONFIGS / f"pangu_tiny_{name}.yaml", tmp_path)
    tokenizer = ("--tokenizer", tmp_path / "one" / "checkpoint" / "tokenizer.model", "--strategy", strategy)
    several = trained(tmp_path / "several", *flags, *tokenizer, processes=load_strategy(strategy).mesh.size)
    assert set(several) == set(one)
    for key, value in one.items():
        np.testing.assert_allclose(several[key], value, rtol=0, atol=1e-5, err_msg=key)


def test_frozen_weights_stay_and_a_resumed_run_is_the_same(groups, tmp_path):
    out = tmp_path / "out"
    flags = ("--parameter-groups", groups, "--save-every", 2)
    weights = trained(out, *flags)
    start = trained(tmp_path / "start", "--learning-rate", 0, "--min-learning-rate", 0)
    for key, value in weights.items():
        assert np.array_equal(value, start[key]) == key.startswith("layers.0."), key
    manifest = json.loads((out / "checkpoints" / "step-00000002" / "manifest.json").read_text())
    assert all(name.startswith("layers.0.") for name in manifest["state"]["frozen"])
    assert not any(name.startswith(("adam_m.layers.0.", "adam_v.layers.0.")) for name in manifest["tensors"])

    for file in (out / "checkpoints" / "step-00000004").iterdir():
        file.unlink()
    (out / "checkpoints" / "step-00000004").rmdir()
    again = trained(out, *flags, "--resume")
    assert all(value.tobytes() == weights[key].tobytes() for key, value in again.items())

    other = tmp_path / "other.yaml"
    other.write_text(GROUPS.replace("0.1", "0.2"))
    for changed in (("--parameter-groups", other), ()):
        data = ("--data", ROOT / "examples" / "small_town.txt", "--output-dir", out)
        refused = tool("tools/train.py", *data, *FLAGS, *changed, "--save-every", 2, "--resume")
        assert refused.code == 2
        assert "optimizer parameter_groups was" in refused.output
