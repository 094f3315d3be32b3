# SPDX-License-Identifier: Apache-2.0
"""Start a run of any task from its flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from sporeloom.core.command_line import parse_args
from sporeloom.core.locks import one_writer
from sporeloom.runtime.environment import launched_processes, prepare_environment
from sporeloom.runtime.launch import LAUNCHER_FLAGS, STOPPED, launch_verb
from sporeloom.train.budget import data_budget
from sporeloom.train.checks import check
from sporeloom.train.config import Run, TrainingConfig
from sporeloom.train.elastic import run_elastic
from sporeloom.train.example_view import view
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.tuning import TuningConfig

TRAINER = "sporeloom.train.trainer"


def run_training(verb: str, kind: type[TrainingConfig], description: str | None, argv: Sequence[str]) -> int:
    """Train as the flags of `kind` say; with --launch in as many processes as the strategy needs. Returns the exit
    code."""
    config = parse_args(kind, description or "", argv, lambda config: check(config, _num_processes(config)))
    count = config.inspect if isinstance(config, TuningConfig) else 0
    wants_budget = isinstance(config, TrainConfig) and config.data_budget
    run = check(config, _num_processes(config))
    if count or wants_budget:
        for line in data_budget(run) if wants_budget else view(run, count, sys.stdout.isatty()):
            print(line)
        return 0
    if config.launch:
        folder = run.config.output_dir
        with one_writer(folder):  # for all its processes
            if config.elastic:
                words = [word for word in _with_folder(argv, run) if word not in LAUNCHER_FLAGS]
                return run_elastic([verb, *words], run, TRAINER)
            return launch_verb(verb, _with_folder(argv, run), run.strategy.mesh, folder / "logs", TRAINER)
    prepare_environment()
    train = import_module(TRAINER).train  # loads MindSpore, which the checks above do without
    return 0 if train(run) else STOPPED


def _num_processes(config: TrainingConfig) -> int | None:
    """Number of processes of the job, where they run already."""
    return None if config.launch or config.only_looks else launched_processes()


def _with_folder(argv: Sequence[str], run: Run) -> list[str]:
    """The command line of the job's processes, with the one folder that all of them use."""
    words, folder = list(argv), run.config.output_dir
    for at, word in enumerate(words):
        if word == "--resume" and at + 1 < len(words) and not words[at + 1].startswith("-"):
            del words[at + 1]
        elif word.startswith("--resume="):
            words[at] = "--resume"
    return [*words, "--output-dir", str(folder)]
