# SPDX-License-Identifier: Apache-2.0
"""Weights that are no numbers: NaN and infinity, which a file or a cast to a narrower type may have left in a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sporeloom.errors import ConfigError

MAX_NAMED = 8
"""Tensors that a message names."""
BLOCK = 1 << 18
"""Numbers that are looked at together: what is made of them stays in a processor's cache."""
FLOAT32_MAX, FLOAT32_TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits of an exponent; all of them are set in NaN and infinity alone. Several times as fast as a float's own test."""


def is_finite(array: NDArray[Any]) -> bool:
    """Whether no entry is NaN or infinite. Of whole numbers none is."""
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
    """How much of a tensor is not finite, by its numbers in order: `1 NaN and 2 infinite of 16,384, the first at [3, 3]`.
    None: nothing is."""
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
    """What to say of the tensors of a file that are not finite, of which `found` has what `describe` says."""
    told = [f"{name} ({text})" for name, text in found.items()]
    more = f" and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
    return (
        f"{source}: not finite: {', '.join(told[:MAX_NAMED])}{more}; write it again from weights that are (in float16 "
        "numbers above 65504 become infinite, in bfloat16 and float32 they do not)"
    )


def check_finite(tensors: Mapping[str, NDArray[Any]], source: object) -> None:
    """Look at whole tensors.

    Raises:
        ConfigError: some hold NaN or infinity; names them.
    """
    bad = {name: value for name, value in tensors.items() if not is_finite(value)}
    if bad:
        raise ConfigError(not_finite(source, {name: str(describe([v], v.shape)) for name, v in bad.items()}))


def narrow(array: NDArray[Any], kind: np.dtype[Any], what: str) -> NDArray[Any]:
    """Finite numbers in another type, without a copy where they are of it already.

    Raises:
        ConfigError: one is larger than that type holds.
    """
    result = array
    if array.dtype != kind:
        with np.errstate(over="ignore"):  # told below
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
