# SPDX-License-Identifier: Apache-2.0
"""The compiled graphs that runs on this machine share.

    sporeloom kept-graphs list
    sporeloom kept-graphs clear

They lie in the user's cache directory; SPORELOOM_KEPT_GRAPHS=0 keeps and reads none, SPORELOOM_KEPT_GRAPHS=FOLDER moves them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from sporeloom.cli import argument, parse_args
from sporeloom.log import counted
from sporeloom.runtime.environment import prepare_environment


@dataclass(frozen=True, kw_only=True)
class KeptGraphsConfig:
    what: Literal["list", "clear"] = argument("list them, or remove them all")


def main(argv: Sequence[str]) -> int:
    config = parse_args(KeptGraphsConfig, __doc__, argv)
    prepare_environment()
    kept_graphs = import_module("sporeloom.runtime.cpu.kept_graphs")  # loads MindSpore
    if config.what == "clear":
        count, size = kept_graphs.clear()
        print(f"removed {counted(count, 'graph', 'graphs')}, {size / 1e6:.1f} MB, from {kept_graphs.folder()}")
        return 0
    found = kept_graphs.kept()
    for path, used, size in reversed(found):
        print(f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(used))}  {size / 1e6:8.2f} MB  {path.name[:16]}")
    total = sum(size for _, _, size in found)
    print(f"{counted(len(found), 'graph', 'graphs')}, {total / 1e6:.1f} MB, in {kept_graphs.folder()}")
    return 0
