# SPDX-License-Identifier: Apache-2.0
"""Name the first operator, rank and tensor in which two recorded runs of one program differ.

    sporeloom bisect out_a out_b

Both runs were made with --record, from the same command. Exit code 1: they differ.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from sporeloom.core.command_line import argument, parse_args
from sporeloom.runtime.environment import prepare_environment


@dataclass(frozen=True, kw_only=True)
class BisectConfig:
    """Flags of `sporeloom bisect`."""

    a: Path = argument("folder of a run that was recorded with --record")
    b: Path = argument("folder of the run that it is compared with")


def main(argv: Sequence[str]) -> int:
    config = parse_args(BisectConfig, __doc__, argv)
    prepare_environment()
    kind = import_module("sporeloom.runtime.cpu.recording").Recording
    a, b = kind(config.a), kind(config.b)
    for recording in (a, b):
        for what in recording.other_versions():
            print(f"other version: {recording.run} was recorded with {what}")
    os.environ.update(a.environment(min(a.roots)))  # before MindSpore is loaded
    found = import_module("sporeloom.runtime.cpu.differences").first_difference(a, b)
    if found is None:
        steps = sorted(set(a.common_steps()) & set(b.common_steps()))
        print(f"steps {steps[0]} to {steps[-1]} of all {len(a.roots)} ranks are equal bit for bit")
        return 0
    print(f"first difference: {found}")
    return 1
