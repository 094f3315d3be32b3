# SPDX-License-Identifier: Apache-2.0
"""Elementary functions of arrays, whose bits do not depend on where the arrays lie in memory.

NumPy has two routines for most of them, a unit in the last place apart: a vectorized one, and a scalar one for results that
overlap their input, which it also takes where the result happens to begin where the input ends. Memory allocators that pack
arrays of a size together, as jemalloc does, make that depend on what was allocated before. A result that is written over a
copy of its input is always vectorized.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]


def exp(x: ArrayLike) -> Floats:
    y = _copy(x)
    return np.exp(y, out=y)


def log(x: ArrayLike) -> Floats:
    y = _copy(x)
    return np.log(y, out=y)


def expm1(x: ArrayLike) -> Floats:
    y = _copy(x)
    return np.expm1(y, out=y)


def _copy(x: ArrayLike) -> Floats:
    """A contiguous array of its own, float64 unless `x` is of another floating type."""
    x = np.asarray(x)
    return np.array(x, x.dtype if x.dtype.kind == "f" else np.float64, order="C")
