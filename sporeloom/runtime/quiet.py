# SPDX-License-Identifier: Apache-2.0
"""Threads of MindSpore that leave the cores to others, for processes that share them."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
from pathlib import Path

from sporeloom.core.compiled import c_compiler, kept_or_built, why_unusable
from sporeloom.core.log import milestone_once

SWITCH = "SPORELOOM_QUIET_THREADS"
"""Environment variable: 0 leaves MindSpore's threads as they are."""
SOURCE = Path(__file__).parent / "native" / "quiet_threads.c"
FLAGS = ("-O2", "-shared", "-fPIC")
ONE_THREAD = (*FLAGS, "-DONE_THREAD")


@functools.cache
def quiet_threads(num_cores: int) -> bool:
    """Let idle threads of MindSpore, which must not be loaded yet, sleep at once in this process and its forks. They poll for
    up to 0.1 s otherwise, which takes the cores from the other processes of a job. With one core, a kernel also runs its
    tasks in the thread that calls it, instead of yielding until a second thread has run some. No number changes.

    Args:
        num_cores: of this process.

    Returns:
        Whether they will. Without a C compiler, or where another system than Linux runs, they will not.
    """
    compiler = c_compiler()
    if os.environ.get(SWITCH) == "0" or platform.system() != "Linux" or compiler is None:
        return False
    try:
        # Names of a library that is loaded so are found before those of libraries that are loaded later, as with LD_PRELOAD.
        ctypes.CDLL(
            str(kept_or_built(compiler, SOURCE, ONE_THREAD if num_cores == 1 else FLAGS)), mode=ctypes.RTLD_GLOBAL
        )
    except (OSError, subprocess.SubprocessError) as error:
        milestone_once(f"{SOURCE.name} cannot be used, processes that share cores are slower: {why_unusable(error)}")
        return False
    return True
