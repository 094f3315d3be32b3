# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own files of every rank: what its transformation makes of them is the checkpoint they were made from."""

import pytest
from conftest import CONFIGS, tool
from mindspore import load_checkpoint
from safetensors.numpy import load_file

MLP_UP = "layers.0.mlp.up.weight"

pytestmark = pytest.mark.slow


def convert(*arguments):
    return tool("tools/convert_checkpoint.py", "--from", "ours", "--to", "ours", *arguments)


@pytest.mark.parametrize(
    ("strategy", "layouts", "parts"),
    [
        ("pangu_tiny_dp2_tp2_zero", "layouts/strategy_0.ckpt", 4),
        ("pangu_tiny_dp4_zero", "layouts/strategy_0.ckpt", 4),
        ("pangu_tiny_tp2_pp2", "layouts", 2),
        ("pangu_tiny_dp2_pp2_zero", "layouts", 2),
    ],
)
def test_there_and_back_is_bit_identical(checkpoint, tmp_path, strategy, layouts, parts):
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    outcome = convert(checkpoint, ranks, "--ranks-of", CONFIGS / f"{strategy}.yaml")
    assert outcome.code == 0, outcome.output
    assert len(list(ranks.glob("rank_*/*.ckpt"))) == 4
    whole = load_file(checkpoint / "model.safetensors")[MLP_UP].shape
    (held,) = (
        v.shape for n, v in load_checkpoint(str(ranks / "rank_0" / "checkpoint_0.ckpt")).items() if n.endswith(MLP_UP)
    )
    assert held == (whole[0] // parts, *whole[1:])  # a part, not the whole on every rank
    outcome = convert(ranks, back, "--layouts", ranks / layouts, "--size", "tiny")
    assert outcome.code == 0, outcome.output
    first, second = (load_file(folder / "model.safetensors") for folder in (checkpoint, back))
    assert {name: value.tobytes() for name, value in second.items()} == {n: v.tobytes() for n, v in first.items()}
    assert (back / "config.json").read_text() == (checkpoint / "config.json").read_text()


def test_what_cannot_be_put_together_says_why(checkpoint, tmp_path):
    cases = [
        ((tmp_path, tmp_path / "x", "--layouts", tmp_path), "contains no rank_0/*.ckpt"),
        ((checkpoint, tmp_path, "--ranks-of", CONFIGS / "pangu_tiny_tp4.yaml"), "is there already"),
        ((checkpoint, tmp_path / "x", "--ranks-of", CONFIGS / "pangu_13b_tp8.yaml"), "num_heads"),
    ]
    (tmp_path / "ranks" / "rank_0").mkdir(parents=True)
    (tmp_path / "ranks" / "rank_0" / "a.ckpt").write_bytes(b"nonsense")
    (tmp_path / "layouts.ckpt").write_bytes(b"nonsense")
    cases.append(
        (
            (tmp_path / "ranks", tmp_path / "x", "--layouts", tmp_path / "layouts.ckpt", "--size", "tiny"),
            "MindSpore cannot merge these files",
        )
    )
    for arguments, words in cases:
        outcome = convert(*arguments)
        assert outcome.code == 2, outcome.output
        assert words in outcome.output
        assert "Traceback" not in outcome.output
    assert not (tmp_path / "x").exists()
