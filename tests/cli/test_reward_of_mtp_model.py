# SPDX-License-Identifier: Apache-2.0
"""A reward model of a model with multi-token prediction, whose layers it leaves out: full weights, and adapters."""

import json

import pytest
from conftest import ROOT, tool

from sporeloom.checkpoint.model_folder import load_config, load_weights

pytestmark = pytest.mark.slow

MODEL = {
    **{"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "vocab_size": 300, "seq_len": 16},
    **{"experts": None, "num_mtp_layers": 1},
}
FLAGS = ("--seq-len", 16, "--batch-size", 2, "--steps", 1, "--warmup-steps", 0, "--learning-rate", 0.01)


def test_layers_of_multi_token_prediction_are_left_out(tmp_path):
    model, pairs, base = tmp_path / "model.json", tmp_path / "pairs.jsonl", tmp_path / "base" / "checkpoint"
    model.write_text(json.dumps(MODEL))
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2)
    data = ("--data", ROOT / "examples" / "small_town.txt", "--size", "ultra_moe_tiny", "--config", model)
    outcome = tool("tools/train.py", *data, *FLAGS, "--output-dir", base.parent)
    assert outcome.code == 0, outcome.output
    before = load_weights(base)
    assert any(name.startswith("mtp.") for name in before)
    for kind, flags in (("full", ()), ("adapters", ("--lora-r", 2, "--lora-targets", "all-linear"))):
        out = tmp_path / kind
        outcome = tool(
            *("tools/reward.py", "--from-checkpoint", base, "--data", pairs, *FLAGS, *flags, "--output-dir", out)
        )
        assert outcome.code == 0, outcome.output
        found = load_weights(out / "checkpoint")
        assert load_config(out / "checkpoint")[1].value_head
        assert found.keys() == {name for name in before if not name.startswith("mtp.")} | {"head.weight"}
