# SPDX-License-Identifier: Apache-2.0
"""Memory of the KV cache and the inputs of one CPU process."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mindspore import Parameter
from numpy.typing import NDArray

from sporeloom.checkpoint.tensor_files import numpy_dtype

LINE = 64
"""Bytes of a cache line."""


def side_by_side(parameters: Sequence[Parameter]) -> list[NDArray[Any]]:
    """Arrays of zeros for the values of these, in one block of memory: in large pages where Linux has them, each from the
    start of a line of the cache on. Reading vectors that lie across two lines, from many small pages, makes a product of 20
    rows take a third longer."""
    sizes = [-(-parameter.nbytes // LINE) * LINE for parameter in parameters]
    starts = list(accumulate(sizes, initial=0))
    has_large_pages = hasattr(mmap, "MADV_HUGEPAGE")
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if has_large_pages else {}
    block = mmap.mmap(-1, starts[-1] or LINE, **private)
    if has_large_pages:
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return [
        np.frombuffer(block, numpy_dtype(str(parameter.dtype).lower()), parameter.size, start).reshape(parameter.shape)
        for parameter, start in zip(parameters, starts, strict=False)
    ]
