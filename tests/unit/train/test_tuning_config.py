# SPDX-License-Identifier: Apache-2.0
"""What runs of fine-tuning are told: all mistakes at once, in the words of the flags."""

import dataclasses
import json

import pytest

from mindloom.checkpoint.io import write_config
from mindloom.errors import ConfigError
from mindloom.models.family import size_config
from mindloom.train.config import check
from mindloom.train.tuning import DPOConfig, GRPOConfig, PPOConfig, RewardConfig, SFTConfig


@pytest.fixture
def common(tmp_path):
    """Flags that are right, as far as configurations are looked at."""
    folder = tmp_path / "base"
    folder.mkdir()
    write_config(folder, "pangu", size_config("pangu", "tiny"))
    line = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    return {"from_checkpoint": folder, "data": tmp_path / "lines.jsonl", "output_dir": tmp_path / "out"}


def problems(config):
    with pytest.raises(ConfigError) as error:
        check(config, 1)
    return error.value.problems


def test_a_run_says_family_and_size_by_its_checkpoint(common):
    run = check(SFTConfig(**common, lora_r=4), 1)
    assert run.family == "pangu" and run.model == dataclasses.replace(size_config("pangu", "tiny"), dropout_rate=0.0)
    assert run.learning_rate == pytest.approx(1e-4) and run.lora.targets(run.model)[0] == "layers.0.attention.query"
    assert check(SFTConfig(**common), 1).learning_rate == pytest.approx(1e-5)


def test_a_reward_model_has_a_head_of_its_own(common):
    run = check(RewardConfig(**common, batch_size=6), 1)
    assert run.model.value_head and not run.model.tied_embedding
    assert run.sizes.of_step(0) == (12, 128)  # two rows for each pair


@pytest.mark.parametrize(
    ("kind", "flags", "told"),
    [
        (DPOConfig, {"label_smoothing": 0.6, "loss_type": "hinge"}, ["is for sigmoid and robust", "must be below 0.5"]),
        (GRPOConfig, {"num_generations": 5, "reward": ("x.py:f",)}, ["--batch-size 32 is no whole number of groups"]),
        (GRPOConfig, {}, ["no reward: give --reward FILE.py:FUNCTION"]),
        (PPOConfig, {"reward": ("humaneval-x:python",)}, ["give --allow-execution, too"]),
        (RewardConfig, {"lora_r": 8}, ["a reward model is trained whole here"]),
        (
            SFTConfig,
            {"lora_r": 8, "lora_targets": ("attention.qury",)},
            ["attention.qury matches no matrix; there are attention.key"],
        ),
        (SFTConfig, {"lora_r": 0, "steps": 0}, ["--lora-r must be at least 1", "--steps must be at least 1"]),
        (SFTConfig, {"seq_len": 4096}, ["--seq-len 4096 is outside 1 .. 128"]),
    ],
)
def test_mistakes_are_told_together(common, kind, flags, told):
    found = "\n".join(problems(kind(**common, **flags)))
    assert all(text in found for text in told), found


def test_lines_of_another_task_are_told(common):
    common["data"].write_text('{"text": "a"}\n')
    assert problems(SFTConfig(**common))[0].endswith(":1: has text; wanted: messages or prompt, completion")
    assert problems(DPOConfig(**common))[0].endswith(
        ":1: has text; wanted: prompt, chosen, rejected or chosen, rejected"
    )
