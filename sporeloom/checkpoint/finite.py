# SPDX-License-Identifier: Apache-2.0
"""Find NaN and infinity in weights, which a file or a cast to a narrower type may have left in a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError

MAX_NAMED = 8
"""Maximum number of tensors that a message names."""
BLOCK = 1 << 18
"""Number of values that are checked together: temporary arrays stay in a processor's cache."""
FLOAT32_MAX, FLOAT32_TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits of an exponent; all of them are set only in NaN and infinity. Several times as fast as the test of floats."""


def is_finite(array: NDArray[Any]) -> bool:
    """Whether no entry is NaN or infinite; integers always pass."""
    mask = _EXPONENT.get(array.dtype.name)
    if mask is None and array.dtype.kind != "f":
        return True
    flat = np.ascontiguousarray(array).reshape(-1)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        if mask is None:
            if not np.isfinite(block).all():
                return False
        elif ((block.view(np.uint16) & mask) == mask).any():
            return False
    return True


def describe(pieces: Iterable[NDArray[Any]], shape: tuple[int, ...]) -> str | None:
    """Describe the non-finite values of a tensor, by its slices in order: `1 NaN and 2 infinite of 16,384, the
    first at [3, 3]`. None: all are finite."""
    num_nan = num_infinite = seen = 0
    first = None
    for piece in pieces:
        if not is_finite(piece):
            with np.errstate(invalid="ignore"):  # of NaN that signals
                wide = piece.reshape(-1).astype(np.float64)
            bad, nan = ~np.isfinite(wide), np.isnan(wide)
            num_nan, num_infinite = num_nan + int(nan.sum()), num_infinite + int((bad & ~nan).sum())
            first = seen + int(bad.argmax()) if first is None else first
        seen += piece.size
    if first is None:
        return None
    place = [int(index) for index in np.unravel_index(first, shape)] if shape else []
    counts = [f"{count:,} {kind}" for count, kind in ((num_nan, "NaN"), (num_infinite, "infinite")) if count]
    return f"{' and '.join(counts)} of {seen:,}, the first at {place}"


def not_finite(source: object, found: Mapping[str, str]) -> str:
    """Describe the tensors of a file that are not finite; `found` has the texts of `describe`."""
    told = [f"{name} ({text})" for name, text in found.items()]
    more = f" and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
    return (
        f"{source}: not finite: {', '.join(told[:MAX_NAMED])}{more}; write it again from weights that are (in float16 "
        "numbers above 65504 become infinite, in bfloat16 and float32 they do not)"
    )


def check_finite(tensors: Mapping[str, NDArray[Any]], source: object) -> None:
    """Check unsharded tensors.

    Raises:
        ConfigError: some hold NaN or infinity; names them.
    """
    bad = {name: value for name, value in tensors.items() if not is_finite(value)}
    if bad:
        raise ConfigError(not_finite(source, {name: str(describe([v], v.shape)) for name, v in bad.items()}))


def narrow(array: NDArray[Any], kind: np.dtype[Any], what: str) -> NDArray[Any]:
    """Cast finite numbers to another type, without a copy where they have it already.

    Raises:
        ConfigError: one is larger than that type holds.
    """
    result = array
    if array.dtype != kind:
        with np.errstate(over="ignore"):  # reported below
            result = array.astype(kind)
        if not _holds_all_of(kind, array.dtype) and not is_finite(result):
            largest, most = float(np.abs(array).max()), float(ml_dtypes.finfo(kind).max)
            raise ConfigError(
                f"{what}: numbers up to {largest:.6g} do not fit into {kind.name}, which ends at {most:.6g}"
            )
    return result


def _holds_all_of(kind: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether a type's range includes another one's."""
    kinds = (kind, other)
    if any(each.kind != "f" and each.name != "bfloat16" for each in kinds):
        return other.kind != "f" and other.name != "bfloat16"
    return float(ml_dtypes.finfo(kind).max) >= float(ml_dtypes.finfo(other).max)
