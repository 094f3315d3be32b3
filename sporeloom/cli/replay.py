# SPDX-License-Identifier: Apache-2.0
"""Run one recorded step of one rank again, alone, and compare it bit for bit.

    sporeloom train --data corpus.txt --strategy pangu_tiny_tp2 --record 2 --output-dir out --launch
    sporeloom replay out --step 50 --rank 1

Messages of other ranks are read from the recording. Exit code 1: an output or a parameter differs from the recorded one, as
after a fault of the machine, or with another version of MindSpore.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from sporeloom.core.command_line import argument, option, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Natural, number_problems
from sporeloom.runtime.environment import prepare_environment
from sporeloom.runtime.recorded_environment import take_over_environment

SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Flags of `sporeloom replay`."""

    run: Path = argument("folder of a run that was recorded with --record")
    step: Natural = option(..., "step that runs again")
    rank: Natural = option(0, "rank that runs again")


def main(argv: Sequence[str]) -> int:
    config = parse_args(ReplayConfig, __doc__, argv)
    if problems := list(number_problems(config)):
        raise ConfigError(problems)
    take_over_environment(config.run, config.rank)
    prepare_environment()
    recording = import_module("sporeloom.runtime.cpu.recording").Recording(config.run)
    recording.read(config.rank, config.step)
    for what in recording.other_versions():
        print(f"other version: recorded with {what}")
    module = import_module("sporeloom.runtime.cpu.replay")
    found = module.replay(recording, config.rank, config.step)
    where = f"step {config.step} of rank {config.rank}"
    for what in found.differences[:SHOWN]:
        print(f"{where} differs from the recording: {what}")
    if found.differences:
        return 1
    print(f"{where}: {found.num_messages} messages; {found.num_values} values are bit for bit those of the recording")
    return 0
