# SPDX-License-Identifier: Apache-2.0
"""A run with QK-clip: resumed it gives the same bits, its metrics name the largest attention logit, and moving averages are
of clipped weights."""

import json
import shutil

import numpy as np
import pytest
from conftest import ROOT, TWO_LAYERS, tool
from safetensors.numpy import load_file

pytestmark = [pytest.mark.slow, pytest.mark.long]

DATA = ("--data", ROOT / "examples" / "small_town.txt", "--config", TWO_LAYERS, "--seq-len", 32, "--batch-size", 4)
RATES = ("--learning-rate", 0.01, "--warmup-steps", 0, "--optimizer", "muon", "--steps", 4, "--save-every", 2)


def trained(out, *flags):
    averaged = ("--qk-clip-threshold", 0.02, "--ema-decay", 0.001)
    return tool("tools/train.py", *DATA, *RATES, *averaged, "--output-dir", out, *flags)


def test_a_resumed_run_gives_the_same_bits(tmp_path):
    assert trained(tmp_path / "one").code == 0
    shutil.copytree(tmp_path / "one", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step-00000004")
    assert trained(tmp_path / "stopped", "--resume").code == 0
    metrics = [(tmp_path / name / "metrics.jsonl").read_text().strip().split("\n") for name in ("one", "stopped")]
    names = ("loss", "max_attention_logit", "max_attention_logit_layer", "max_attention_logit_head", "clipped_heads")
    one, stopped = ([[json.loads(line)[name] for name in names] for line in lines] for lines in metrics)
    assert one == stopped
    assert one[-1][-1] > 0
    for kind in ("checkpoint", "ema_checkpoint"):
        files = [(tmp_path / name / kind / "model.safetensors").read_bytes() for name in ("one", "stopped")]
        assert files[0] == files[1]
    weights, averages = (
        load_file(tmp_path / "one" / kind / "model.safetensors") for kind in ("checkpoint", "ema_checkpoint")
    )
    for (
        name,
        value,
    ) in weights.items():  # but for a thousandth of what the last step changed; clipping changes a hundredth
        np.testing.assert_allclose(averages[name], value, rtol=0, atol=1e-4, err_msg=name)
