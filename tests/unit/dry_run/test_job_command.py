# SPDX-License-Identifier: Apache-2.0
"""The command that a dry run ends with describes the job that was compiled, for the parser of that command."""

import shlex
from typing import get_args

import pytest

from sporeloom.cli import launch_script
from sporeloom.core.command_line import parse_args
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.job_command import command_of
from sporeloom.inference.config import GenerateConfig
from sporeloom.planner.task import TaskName
from sporeloom.strategy.launching import msrun_line, start_lines
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.policy import GRPOConfig, PPOConfig
from sporeloom.train.preferences import KTOConfig, ORPOConfig, SimPOConfig
from sporeloom.train.tuning import DPOConfig, RewardConfig, SFTConfig

CONFIGS = {
    "pretraining": TrainConfig,
    "sft": SFTConfig,
    "reward": RewardConfig,
    "dpo": DPOConfig,
    "simpo": SimPOConfig,
    "orpo": ORPOConfig,
    "kto": KTOConfig,
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
}


def dry_run(**flags):
    return check(DryRunConfig(strategy="pangu_tiny_dp2_tp2", **flags))


@pytest.mark.parametrize("task", get_args(TaskName))
def test_the_command_has_the_batch_and_the_length_of_the_dry_run(task):
    run = dry_run(task=task, batch_size=8, seq_len=64, accumulate=2, compute_dtype="float16")
    name, *flags = command_of(run)
    config = parse_args(CONFIGS[task], "", [flag.replace("BETA", "0.1") for flag in flags])
    assert name == (task if task != "pretraining" else "train")
    assert config.batch_size * config.rows_per_unit == run.batch_size == 8
    assert (config.seq_len, config.accumulate, config.compute_dtype) == (64, 2, "float16")


def test_adapters_and_auxiliary_models_are_in_the_command():
    run = dry_run(task="grpo", lora_r=4, lora_targets=("q_proj", "mlp.up"), reference=True, reward_size="tiny")
    flags = [flag.replace("BETA", "0.1") for flag in command_of(run)[1:]]
    config = parse_args(GRPOConfig, "", flags)
    assert (config.lora_r, config.lora_targets, config.beta) == (4, ("q_proj", "mlp.up"), 0.1)
    assert str(config.reward_model) == "REWARD_MODEL"


def test_the_command_of_an_inference_dry_run_generates():
    name, *flags = command_of(dry_run(inference=True))
    assert name == "generate" and parse_args(GenerateConfig, "", flags)


@pytest.mark.parametrize(("size", "per_server", "servers"), [(4, 8, 1), (8, 8, 1), (64, 8, 8), (8, 6, 4)])
def test_the_lines_are_those_of_launch_script(size, per_server, servers, tmp_path, capsys):
    strategy = tmp_path / "strategy.yaml"
    strategy.write_text(f"mesh: {{dp: {size}}}\nrules: decoder\n")
    words = ["train", "--data", "a corpus.txt", "--batch-size", str(size)]
    lines = start_lines(words, str(strategy), size, per_server)
    assert lines[1].count("msrun") == 1 and f"--worker_num={size} " in lines[1]
    local = size // servers
    if servers == 1:
        assert len(lines) == 2 and "master_addr" not in lines[1]
        written = [f"--strategy={strategy}", "--", *words]
    else:
        written = shlex.split(lines[3].removeprefix("  sporeloom launch-script "))
    assert launch_script.main(written) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("msrun")]
    command = [*words, "--strategy", str(strategy)]
    assert printed == [msrun_line(command, size, local, "MASTER_ADDR", str(number)) for number in range(servers)]
