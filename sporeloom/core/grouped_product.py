# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows, each with its own matrix, in NumPy: the first counts[0] rows are of group 0, and so on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SHARE_OF_ROWS = "share_of_rows"
"""Attribute of a product of groups whose rows each rank sorts, those of the groups that it has in front: the part of the rows
that belongs to these groups, in the mean over ranks."""


def grouped_product(x: Array, weight: Array, counts: Array) -> Array:
    """x (R, K), weight (E, N, K), counts (E,) -> (R, N); rows after the last group are 0."""
    y = np.empty((len(x), weight.shape[1]), np.float32)
    for group, rows in _groups(counts, len(x)):
        np.matmul(x[rows].astype(np.float32, copy=False), weight[group].astype(np.float32, copy=False).T, out=y[rows])
    y[int(counts.sum()) :] = 0.0
    return y.astype(x.dtype, copy=False)


def grouped_outer_product(x: Array, y: Array, counts: Array) -> Array:
    """x (R, K), y (R, N), counts (E,) -> (E, N, K): the gradient of the weights, from that of the result."""
    products = np.zeros((len(counts), y.shape[1], x.shape[1]), np.float32)
    for group, rows in _groups(counts, len(x)):
        np.matmul(y[rows].T.astype(np.float32, copy=False), x[rows].astype(np.float32, copy=False), out=products[group])
    return products.astype(x.dtype, copy=False)


def _groups(counts: Array, num_rows: int) -> Iterator[tuple[int, slice]]:
    """The groups that have rows."""
    if counts.min(initial=0) < 0 or counts.sum() > num_rows:
        raise ValueError(f"groups of {counts.tolist()} rows are not in {num_rows} rows")
    end = 0
    for group, count in enumerate(counts.tolist()):
        start, end = end, end + count
        if count:
            yield group, slice(start, end)
