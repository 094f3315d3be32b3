# SPDX-License-Identifier: Apache-2.0
"""Lines through measured seconds. Errors count relative to what was measured: small and large sizes weigh the same."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def line(sizes: Sequence[float], seconds: Sequence[float], scales: Sequence[float] = ()) -> tuple[float, float]:
    """Intercept and slope with the least squares of relative errors, neither of them negative.

    Args:
        seconds: of each size; those of other work may have been subtracted.
        scales: what errors are relative to, all positive (default: `seconds`).
    """
    scales = scales or seconds
    ones = [1 / scale for scale in scales]
    xs, ys = ([value / scale for value, scale in zip(of, scales, strict=True)] for of in (sizes, seconds))
    a, b, c = _dot(ones, ones), _dot(ones, xs), _dot(xs, xs)
    d, e = _dot(ones, ys), _dot(xs, ys)
    choices = [(max(0.0, d / a), 0.0), (0.0, max(0.0, e / c))]  # the best lines at the bounds
    if (determinant := a * c - b * b) > 1e-12 * a * c:
        best = (d * c - e * b) / determinant, (e * a - d * b) / determinant
        choices = [best] if min(best) >= 0 else choices
    return min(
        choices,
        key=lambda each: sum((each[0] * o + each[1] * x - y) ** 2 for o, x, y in zip(ones, xs, ys, strict=True)),
    )


def through_origin(sizes: Sequence[float], seconds: Sequence[float], scales: Sequence[float]) -> float:
    """Slope of the line through zero with the least squares of relative errors; may be negative."""
    xs, ys = ([value / scale for value, scale in zip(of, scales, strict=True)] for of in (sizes, seconds))
    return _dot(xs, ys) / _dot(xs, xs)


def spread(seconds: Sequence[float]) -> float:
    """Half of the distance between the quartiles, relative to the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
