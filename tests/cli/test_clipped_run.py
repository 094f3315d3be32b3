# SPDX-License-Identifier: Apache-2.0
"""A run with QK-clip: resumed it gives the same bits, and its metrics name the largest attention logit."""

import json

import pytest
from conftest import ROOT, TWO_LAYERS, tool

pytestmark = [pytest.mark.slow, pytest.mark.long]

DATA = ("--data", ROOT / "examples" / "small_town.txt", "--config", TWO_LAYERS, "--seq-len", 32, "--batch-size", 4)
RATES = ("--learning-rate", 0.01, "--warmup-steps", 0, "--optimizer", "muon", "--steps", 4, "--save-every", 2)


def trained(out, *flags):
    return tool("tools/train.py", *DATA, *RATES, "--qk-clip-threshold", 0.02, "--output-dir", out, *flags)


def test_a_resumed_run_gives_the_same_bits(tmp_path):
    assert trained(tmp_path / "one").code == 0
    assert "stopped after step 2" in trained(tmp_path / "stopped", "--stop-after", 2).output
    assert trained(tmp_path / "stopped", "--resume").code == 0
    metrics = [(tmp_path / name / "metrics.jsonl").read_text().strip().split("\n") for name in ("one", "stopped")]
    names = ("loss", "max_attention_logit", "max_attention_logit_layer", "max_attention_logit_head", "clipped_heads")
    one, stopped = ([[json.loads(line)[name] for name in names] for line in lines] for lines in metrics)
    assert one == stopped
    assert one[-1][-1] > 0
    files = [(tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("one", "stopped")]
    assert files[0] == files[1]
