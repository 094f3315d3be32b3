# SPDX-License-Identifier: Apache-2.0
"""Runs a user's script in a warm process."""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

from sporeloom.runtime.environment import launched_rank
from sporeloom.runtime.spmd.compilation_cache import SWITCH

ROOT = Path(__file__).resolve().parent.parent


def run(path, *arguments):
    """What the script prints."""
    said, before = io.StringIO(), sys.argv
    sys.argv = [path, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{path} ended with {ended.code}: {said.getvalue()}") from None
    finally:
        sys.argv = before
    return said.getvalue()


def train_with_graphs_of(folders, arguments):
    """tools/train.py, where every rank has a compilation cache of its own."""
    os.environ[SWITCH] = folders[launched_rank()]
    return run(str(ROOT / "tools" / "train.py"), *arguments)
