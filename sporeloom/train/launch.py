# SPDX-License-Identifier: Apache-2.0
"""From the flags of a run, of whatever task, to the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from sporeloom.cli import parse_args
from sporeloom.locks import one_writer
from sporeloom.runtime.environment import launched_processes, prepare_environment
from sporeloom.runtime.launch import STOPPED, launch_verb
from sporeloom.train.budget import data_budget
from sporeloom.train.config import TrainingConfig, check
from sporeloom.train.example_view import view

TRAINER = "sporeloom.train.trainer"


def run_training(verb: str, kind: type[TrainingConfig], description: str | None, argv: Sequence[str]) -> int:
    """Train as the flags of `kind` say; with --launch in as many processes as the strategy needs. Returns the exit code."""
    config = parse_args(kind, description or "", argv)
    count, wants_budget = getattr(config, "inspect", 0), getattr(config, "data_budget", False)
    run = check(config, None if config.launch or count or wants_budget else launched_processes())
    if count or wants_budget:
        for line in data_budget(run) if wants_budget else view(run, count, sys.stdout.isatty()):
            print(line)
        return 0
    if config.launch:
        with one_writer(config.output_dir):  # for all its processes
            return launch_verb(verb, argv, run.strategy.mesh, config.output_dir / "logs", TRAINER)
    prepare_environment()
    train = import_module(TRAINER).train  # loads MindSpore, which the checks above do without
    return 0 if train(run) else STOPPED
