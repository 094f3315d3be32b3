# SPDX-License-Identifier: Apache-2.0
"""`sporeloom COMMAND ...`, `python -m sporeloom COMMAND ...`; msrun is given this file."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

if not __package__:  # started by its path: Python then looks in this folder first, whose modules have common names
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from sporeloom import __version__
from sporeloom.cli import COMMANDS, EXAMPLES, GROUPS
from sporeloom.core.errors import ConfigError, did_you_mean, run_tool

HELP = ("-h", "--help", "help")


def main(argv: Sequence[str]) -> int | None:
    if not argv or argv[0] in HELP:
        print(overview())
        return 0
    if argv[0] == "--version":
        print(f"sporeloom {__version__}")
        return 0
    verb = argv[0].replace("_", "-")
    if verb not in COMMANDS:
        raise ConfigError(f"unknown command {argv[0]}{did_you_mean(verb, COMMANDS)} (see sporeloom --help)")
    sys.argv[0] = f"sporeloom {verb}"  # what help and the lock of an output folder call this program
    result: int | None = import_module(f"sporeloom.cli.{verb.replace('-', '_')}").main(list(argv[1:]))
    return result


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: sporeloom COMMAND [FLAGS]",
        "",
        "Large language models on MindSpore; parallelism is configuration only.",
    ]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {verb:{width}}  {text}" for verb, text in verbs.items())]
        lines += [f"    $ {EXAMPLES[group]}"]
    return "\n".join(
        [*lines, "", "sporeloom COMMAND --help lists the flags that most runs need, --help-all all of them."]
    )


def run() -> None:
    """The program `sporeloom`."""
    run_tool(main)


if __name__ == "__main__":
    run()
