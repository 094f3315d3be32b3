# SPDX-License-Identifier: Apache-2.0
"""`mindloom VERB ...`, `python -m mindloom VERB ...`; msrun is given this file."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

if not __package__:  # started by its path: Python then looks in this folder first, whose modules have common names
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from mindloom import __version__
from mindloom.errors import ConfigError, did_you_mean, run_tool
from mindloom.verbs import VERBS

HELP = ("-h", "--help", "help")


def main(argv: Sequence[str]) -> int | None:
    if not argv or argv[0] in HELP:
        print(overview())
        return 0
    if argv[0] == "--version":
        print(f"mindloom {__version__}")
        return 0
    verb = argv[0].replace("_", "-")
    if verb not in VERBS:
        raise ConfigError(f"{argv[0]} is no verb of mindloom, which `mindloom --help` lists{did_you_mean(verb, VERBS)}")
    sys.argv[0] = f"mindloom {verb}"  # what help and the lock of an output folder call this program
    result: int | None = import_module(f"mindloom.verbs.{verb.replace('-', '_')}").main(list(argv[1:]))
    return result


def overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:{width}}  {text}" for verb, text in VERBS.items()]
    head = "usage: mindloom VERB ...\n\nLarge language models on MindSpore whose parallelism is configuration only.\n"
    return "\n".join([head, *lines, "", "mindloom VERB --help tells the flags of a verb."])


def run() -> None:
    """The program `mindloom`."""
    run_tool(main)


if __name__ == "__main__":
    run()
