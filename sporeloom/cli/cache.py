# SPDX-License-Identifier: Apache-2.0
"""List or clear the compilation cache: compiled graphs that runs on this machine share.

    sporeloom cache list
    sporeloom cache clear

It lies in the user's cache directory. SPORELOOM_CACHE=0 disables it; SPORELOOM_CACHE=FOLDER moves it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from sporeloom.core.command_line import argument, parse_args
from sporeloom.core.log import counted
from sporeloom.runtime.environment import prepare_environment


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    what: Literal["list", "clear"] = argument("list the cached graphs, or remove all of them")


def main(argv: Sequence[str]) -> int:
    config = parse_args(CacheConfig, __doc__, argv)
    prepare_environment()
    cache = import_module("sporeloom.runtime.spmd.compilation_cache")  # loads MindSpore
    if config.what == "clear":
        count, size = cache.clear()
        print(f"removed {counted(count, 'graph', 'graphs')}, {size / 1e6:.1f} MB, from {cache.folder()}")
        return 0
    found = cache.entries()
    for path, used, size in reversed(found):
        print(f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(used))}  {size / 1e6:8.2f} MB  {path.name[:16]}")
    total = sum(size for _, _, size in found)
    print(f"{counted(len(found), 'graph', 'graphs')}, {total / 1e6:.1f} MB, in {cache.folder()}")
    return 0
