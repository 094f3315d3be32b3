# SPDX-License-Identifier: Apache-2.0
"""Runs tasks of fine-tuning as their tools do, under several strategies, for test_tuning."""

from importlib import import_module
from pathlib import Path

from mindloom.runtime.environment import launched_processes
from mindloom.train import tuning
from mindloom.train.config import check

PATHS = ("data", "from_checkpoint", "strategy", "output_dir", "chat_template", "reward_model")


def run(out, strategies, tasks):
    """Each task {name: (configuration's class, flags)} under each strategy, to OUT/STRATEGY/NAME."""
    train = import_module("mindloom.train.trainer").train  # loads MindSpore
    for strategy in strategies:
        for name, (kind, flags) in tasks.items():
            flags = {
                **flags,
                "output_dir": str(Path(out) / Path(strategy or "one_device").stem / name),
                "strategy": strategy,
            }
            given = {flag: Path(value) if flag in PATHS and value else value for flag, value in flags.items()}
            given = {flag: tuple(value) if isinstance(value, list) else value for flag, value in given.items()}
            train(check(getattr(tuning, kind)(**given), launched_processes()))
