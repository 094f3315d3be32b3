# SPDX-License-Identifier: Apache-2.0
"""What runs of fine-tuning are told: all mistakes at once, in the words of the flags."""

import dataclasses
import json

import pytest
from conftest import CONFIGS

from sporeloom.checkpoint.model_folder import load_config, load_text_config, write_config
from sporeloom.core.errors import ConfigError
from sporeloom.models.family import size_config
from sporeloom.train.checks import check
from sporeloom.train.distill import DistillConfig
from sporeloom.train.max_logit_flags import MaxLogitFlags
from sporeloom.train.policy import GRPOConfig, PPOConfig
from sporeloom.train.preferences import KTOConfig, SimPOConfig
from sporeloom.train.tuning import DPOConfig, RewardConfig, SFTConfig


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


def test_labels_are_true_or_false_and_texts_are_two_at_least(common, tmp_path):
    line = {"prompt": "a", "completion": "b", "label": True}
    for lines, message in (
        ([line, {**line, "label": 1}], "lines.jsonl:2: label must be true or false, got 1"),
        ([line], "one line; kto compares a prompt with another line's text"),
    ):
        (tmp_path / "lines.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        assert message in problems(KTOConfig(**common))[0]
    assert check(KTOConfig(**common, loss_type="apo_zero_unpaired"), 1).sizes.of_step(0) == (8, 128)


def test_a_reward_model_has_a_head_of_its_own(common):
    run = check(RewardConfig(**common, batch_size=6), 1)
    assert run.model.value_head and not run.model.tied_embedding
    assert run.sizes.of_step(0) == (12, 128)  # two rows for each pair


@pytest.mark.parametrize(
    ("kind", "flags", "told"),
    [
        (DPOConfig, {"label_smoothing": 0.6, "loss_type": "hinge"}, ["is for sigmoid and robust", "must be below 0.5"]),
        (GRPOConfig, {"num_generations": 5, "reward": ("x.py:f",)}, ["--batch-size 32 is not a multiple of"]),
        (
            SimPOConfig,
            {"label_smoothing": 0.5, "gamma": -1.0},
            ["must be below 0.5, got 0.5", "--gamma must be at least 0"],
        ),
        (KTOConfig, {}, ["expected: prompt, completion, label"]),
        (GRPOConfig, {"advantage": "leave-one-out"}, ["give --scale-rewards none or batch"]),
        (GRPOConfig, {"temperature": 1e-308}, ["--temperature must be at least 1e-05"]),
        (PPOConfig, {"temperature": 0.0}, ["--temperature must be at least 1e-05"]),
        (GRPOConfig, {}, ["no reward: give --reward FILE.py:FUNCTION"]),
        (PPOConfig, {"reward": ("humaneval-x:python",)}, ["give --allow-execution, too"]),
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


def test_a_teacher_has_the_vocabulary_and_the_context_of_the_student(common, tmp_path):
    def found(flags, strategy=None, **changes):
        (tmp_path / "teacher").mkdir(exist_ok=True)
        write_config(
            tmp_path / "teacher", "pangu", dataclasses.replace(size_config("pangu", "embedded_tiny"), **changes)
        )
        config = DistillConfig(**common, **flags, teacher=tmp_path / "teacher", strategy=strategy)
        return "\n".join(problems(config))

    assert "its vocab_size is 4096, the student's 2048: they must be equal" in found({}, vocab_size=4096)
    assert "its context of 16 tokens is shorter than --seq-len 128" in found({}, seq_len=16)
    head = found({}, value_head=True, tied_embedding=False)
    assert "a reward model, which has no probabilities of tokens" in head
    assert "--top-k 2048: the vocabulary has 2048 tokens" in found({"top_k": 2048})
    assert "--beta must be in [0, 1], got 1.5" in found({"beta": 1.5})
    stages = found({}, CONFIGS / "pangu_tiny_pp4.yaml", num_layers=3)
    assert f"--teacher {tmp_path / 'teacher'}: " in stages and "4 stages are more than the 3 layers" in stages
    heads = found({}, CONFIGS / "pangu_tiny_tp4.yaml", num_heads=6, num_kv_heads=6, head_dim=32)
    assert f"--teacher {tmp_path / 'teacher'}: " in heads and "does not divide num_heads = 6" in heads
    assert not issubclass(DistillConfig, MaxLogitFlags)  # whose counts are of layers that have no losses here
    missing = DistillConfig(**common, teacher=tmp_path / "nothing")
    assert "there is no such checkpoint folder" in "\n".join(problems(missing))


def test_adapters_do_not_take_the_place_of_their_model(common):
    there = common["output_dir"] / "checkpoint"
    there.parent.mkdir()
    common["from_checkpoint"].rename(there)
    common["from_checkpoint"] = there
    assert "adapters would replace the model" in problems(SFTConfig(**common, lora_r=2))[0]


def test_adapters_of_themselves_are_told(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "."}))
    with pytest.raises(ConfigError, match="their own folder; name the model's"):
        load_config(tmp_path)


def test_a_reward_model_must_read_as_the_model_writes(common, tmp_path):
    def told(**changes):
        config = dataclasses.replace(size_config("pangu", "tiny"), **changes)
        write_config(tmp_path / "judge", "pangu", config)
        return problems(PPOConfig(**common, reward_model=tmp_path / "judge"))

    (tmp_path / "judge").mkdir()
    assert any("a language model; give a checkpoint of `sporeloom reward`" in line for line in told())
    values = {"value_head": True, "tied_embedding": False}
    assert any("its context of 64 tokens is shorter than --seq-len 128" in line for line in told(**values, seq_len=64))
    for folder, content in ((tmp_path / "judge", b"one"), (common["from_checkpoint"], b"other")):
        (folder / "tokenizer.model").write_bytes(content)
    assert any("its tokenizer differs from that of" in line for line in told(**values))


def test_a_reward_model_is_no_model_of_text(common):
    config = dataclasses.replace(size_config("pangu", "tiny"), value_head=True, tied_embedding=False)
    write_config(common["from_checkpoint"], "pangu", config)
    assert "only `sporeloom reward` can continue its training" in problems(SFTConfig(**common))[0]
    assert check(RewardConfig(**common), 1).model.value_head
    with pytest.raises(ConfigError, match="a reward model, which generates no text"):
        load_text_config(common["from_checkpoint"])


def test_a_slip_of_the_keyboard_is_not_allocated(common):
    assert "tokens a step are more than" in problems(SFTConfig(**common, batch_size=10_000_000))[0]


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig])
@pytest.mark.parametrize("column", ["completions", "prompts", "completion_ids"])
def test_columns_with_the_names_of_what_functions_are_given_are_told(common, tmp_path, kind, column):
    lines = [{"prompt": "a", "near": "b"}, {"prompt": "c", column: "d"}]
    common["data"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = problems(kind(**common, reward=("rewards.py:f",)))
    assert found[0].startswith(
        f"{common['data']}:2: column '{column}' has the name of another argument of reward functions"
    )
    assert f"give it another name, such as reference_{column}" in found[0]
    judge = dataclasses.replace(size_config("pangu", "tiny"), value_head=True, tied_embedding=False)
    (tmp_path / "judge").mkdir()
    write_config(tmp_path / "judge", "pangu", judge)
    assert check(kind(**common, reward_model=tmp_path / "judge"), 1).data  # which is given no columns


def test_lines_of_another_task_are_told(common):
    common["data"].write_text('{"text": "a"}\n')
    assert problems(SFTConfig(**common))[0].endswith(":1: has text; expected: messages or prompt, completion")
    assert problems(DPOConfig(**common))[0].endswith(
        ":1: has text; expected: prompt, chosen, rejected or chosen, rejected"
    )
