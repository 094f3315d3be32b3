# SPDX-License-Identifier: Apache-2.0
"""A run follows its schedule, and goes on with it when resumed."""

import json
import shutil

import pytest
from conftest import ROOT, TWO_LAYERS, tool

pytestmark = pytest.mark.slow

TRAIN = ("--data", ROOT / "examples" / "small_town.txt", "--config", TWO_LAYERS, "--seq-len", 32, "--steps", 8)
WSD = ("--schedule", "wsd", "--decay-fraction", 0.5, "--decay-shape", "cosine")


def rates(out):
    return [json.loads(line)["learning_rate"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_goes_on_with_its_schedule_and_with_no_other(tmp_path):
    out = tmp_path / "out"
    numbers = ("--learning-rate", 1.0, "--min-learning-rate", 0.5, "--warmup-steps", 2)
    save = ("--save-every", 6, "--output-dir", out)
    outcome = tool("tools/train.py", *TRAIN, *WSD, *numbers, *save)
    assert outcome.code == 0, outcome.output
    whole = rates(out)
    assert whole == pytest.approx([0.5, 1, 1, 1, 0.9267766952966369, 0.75, 0.5732233047033631, 0.5])
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    for changed in (WSD[:4], ("--schedule", "linear")):
        refused = tool("tools/train.py", *TRAIN, *changed, *save, "--resume")
        assert refused.code == 2
        assert "optimizer decay_shape was cosine, is linear" in refused.output or "schedule was wsd" in refused.output
    resumed = tool("tools/train.py", *TRAIN, *WSD, *save, "--resume")  # rates and steps are the earlier run's
    assert resumed.code == 0, resumed.output
    assert rates(out) == whole
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    refused = tool("tools/train.py", *TRAIN, *WSD, *save, "--resume", "--decay-steps", 3)
    assert refused.code == 2
    assert "--decay-fraction 0.5: a decay over that much of 3 steps begins within the warm-up of 2" in refused.output
