# SPDX-License-Identifier: Apache-2.0
"""Symbols exported by MindSpore's libraries, for functions that its Python API lacks."""

from __future__ import annotations

import ctypes
from pathlib import Path

import mindspore as ms


class MissingSymbolError(RuntimeError):
    """A library of this MindSpore does not export a symbol."""


def library(name: str) -> ctypes.CDLL:
    """libmindspore_NAME.so, as loaded by MindSpore."""
    return ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / f"libmindspore_{name}.so"))


def lacks(error: Exception) -> MissingSymbolError:
    return MissingSymbolError(f"MindSpore {ms.__version__} does not export what its partitioner needs here: {error}")
