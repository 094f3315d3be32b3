# SPDX-License-Identifier: Apache-2.0
"""The command that runs what a dry run describes."""

from __future__ import annotations

from sporeloom.dry_run.config import DryRun
from sporeloom.planner.task import TaskFlags

DATA = ("--data", "DATA")
"""Placeholders in capitals stand for what a dry run does not know."""


def command_of(run: DryRun) -> list[str]:
    """The command and its flags, without the strategy."""
    config, task = run.config, run.task
    if config.inference:
        return ["generate", "--checkpoint", "CHECKPOINT", "--prompt-file", "PROMPTS"]
    words = ["train" if task.name == "pretraining" else task.name, *_model_flags(run), *DATA]
    words += ["--batch-size", str(run.batch_size // task.rows_per_unit), "--seq-len", str(run.seq_len)]
    optional = {
        "--accumulate": config.accumulate if config.accumulate > 1 else None,
        "--compute-dtype": config.compute_dtype,
        "--attention": config.attention,
        "--optimizer-state-dtype": "bfloat16" if task.optimizer_state_dtype == "bfloat16" else None,
        "--lora-r": config.lora_r,
        "--reward-model": "REWARD_MODEL" if task.reward_model else None,
        "--reward": "FILE.py:FUNCTION" if task.samples and not task.reward_model else None,
        "--beta": "BETA" if config.reference else None,
    }
    words += [word for flag, value in optional.items() if value is not None for word in (flag, str(value))]
    if config.lora_r and config.lora_targets != TaskFlags.lora_targets:
        words += ["--lora-targets", *config.lora_targets]
    return words


def _model_flags(run: DryRun) -> list[str]:
    config = run.config
    if config.config and config.config.is_dir():  # of `--model FOLDER`
        family = ["--model", config.model] if run.task.name == "pretraining" else []
        return ["--from-checkpoint", str(config.config), *family]
    if run.task.name != "pretraining":
        return ["--from-checkpoint", "CHECKPOINT"]
    file = ["--config", str(config.config)] if config.config else []
    return ["--model", config.model, "--size", config.size, *file]
