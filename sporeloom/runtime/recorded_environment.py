# SPDX-License-Identifier: Apache-2.0
"""The environment in which a step was recorded, read before NumPy and MindSpore are loaded: their libraries read it once."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

FOLDER, PROGRAMS = "record", "programs.json"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables on which the order of a sum may depend."""


def take_over_environment(run: Path, rank: int) -> None:
    """Set the variables as in the recording of a rank. One that cannot be read is reported when it is opened."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        about = json.loads((run / FOLDER / f"rank-{rank}" / PROGRAMS).read_text(encoding="utf-8"))
        os.environ.update({name: about["environment"][name] for name in THREADS if name in about["environment"]})
