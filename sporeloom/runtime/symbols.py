# SPDX-License-Identifier: Apache-2.0
"""What MindSpore's libraries export, for what its Python does not offer."""

from __future__ import annotations

import ctypes
from pathlib import Path

import mindspore as ms


class TargetError(RuntimeError):
    """This MindSpore cannot be given a virtual target."""


def library(name: str) -> ctypes.CDLL:
    """libmindspore_NAME.so, which MindSpore has loaded."""
    return ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / f"libmindspore_{name}.so"))


def lacks(error: Exception) -> TargetError:
    return TargetError(f"MindSpore {ms.__version__} lacks what partitioning leans on: {error}")
