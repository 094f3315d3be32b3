# SPDX-License-Identifier: Apache-2.0
"""Symbols exported by MindSpore's libraries, for functions that its Python API lacks."""

from __future__ import annotations

import ctypes
from pathlib import Path

import mindspore as ms


class TargetError(RuntimeError):
    """This MindSpore does not support a virtual target."""


def library(name: str) -> ctypes.CDLL:
    """libmindspore_NAME.so, as loaded by MindSpore."""
    return ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / f"libmindspore_{name}.so"))


def lacks(error: Exception) -> TargetError:
    return TargetError(f"MindSpore {ms.__version__} lacks what partitioning leans on: {error}")
