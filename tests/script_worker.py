# SPDX-License-Identifier: Apache-2.0
"""Runs a user's script in a warm process."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

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
