# SPDX-License-Identifier: Apache-2.0
"""A hash of a tensor's content that adds up: the hashes of slices, however a tensor is sliced, sum to that of the
full tensor.

hash = sum over all entries of  f(bits(entry)) * product over dims d of w(d, index in d)   (mod 2^64)

`bits` is the entry's memory read as a little-endian unsigned integer, `f(b) = b ^ (b >> half of its bits)`, `w(d, i)`
the SplitMix64 output number i of a stream seeded with d + 1, made odd. So a changed bit of one entry always changes the
hash, and entries that trade places nearly always do. It finds accidents, not forgeries. docs/reference/checkpoint_format.md
has a test vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
BLOCK_ENTRIES = 1 << 20  # hashed at once: twice their bytes are needed besides the tensor

_GAMMA, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def content_hash(array: NDArray[Any], start: Sequence[int] = ()) -> int:
    """Contribution of `array`, which starts at `start` in a tensor, to that tensor's hash."""
    starts = tuple(start) or (0,) * array.ndim
    assert len(starts) == array.ndim, (starts, array.shape)
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    half = unsigned.type(4 * unsigned.itemsize)
    rows = np.ascontiguousarray(array).view(unsigned).reshape(len(array) if array.ndim else 1, -1)
    weights = np.ones(1, np.uint64)
    for dim in range(1, array.ndim):
        weights = np.multiply.outer(weights, _weights(dim, starts[dim], array.shape[dim])).reshape(-1)
    of_rows = _weights(0, starts[0], len(rows)) if array.ndim else np.ones(1, np.uint64)
    step = max(1, BLOCK_ENTRIES // max(1, rows.shape[1]))
    total = 0
    for i in range(0, len(rows), step):
        block = rows[i : i + step]
        mixed = block ^ (block >> half)  # round numbers end in zero bits, which would be lost in the product
        sums = np.einsum("ij,j->i", mixed.astype(np.uint64), weights)
        total += int(np.einsum("i,i->", sums, of_rows[i : i + step]))
    return total & MASK


def _weights(dim: int, start: int, length: int) -> NDArray[np.uint64]:
    """w(dim, start) ... w(dim, start + length - 1)"""
    with np.errstate(over="ignore"):
        z = np.arange(start + 1, start + length + 1, dtype=np.uint64) * _GAMMA + np.uint64(dim + 1)
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)
