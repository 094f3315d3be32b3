# SPDX-License-Identifier: Apache-2.0
"""Compare two configurations: run files, the config.json of runs, or strategy files.

    sporeloom config diff out/latest/config.json other/config.json
    sporeloom config diff small.yaml large.yaml

Run files are read with what they are based on. Exit code 1 if something differs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sporeloom.core.command_line import argument, parse_args
from sporeloom.core.log import print_report
from sporeloom.core.run_file import BASE, based_on
from sporeloom.core.shipped import shipped_or_file

ABSENT = "-"


@dataclass(frozen=True, kw_only=True)
class ConfigDiff:
    what: Literal["diff"] = argument("subcommand: diff compares two configurations")
    first: Path = argument("run file, config.json of a run, or strategy")
    second: Path = argument("configuration to compare with")


def main(argv: Sequence[str]) -> int:
    config = parse_args(ConfigDiff, __doc__, argv)
    first, second = (dict(settings(path)) for path in (config.first, config.second))
    different = [key for key in {**first, **second} if first.get(key, ABSENT) != second.get(key, ABSENT)]
    width = max(map(len, different), default=0)
    for key in different:
        print_report(f"{key:{width}}  {first.get(key, ABSENT)}  ->  {second.get(key, ABSENT)}")
    if not different:
        print(f"{config.first} and {config.second} say the same")
    return 1 if different else 0


def settings(path: Path) -> Iterator[tuple[str, Any]]:
    """List (key, value), with the keys of nested mappings joined by dots."""
    for document in reversed(based_on(shipped_or_file(path))):
        yield from _flat({key: value for key, value in document.mapping.items() if key != BASE}, "")


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
