# SPDX-License-Identifier: Apache-2.0
"""The cost of steps that wait for the slowest of many servers."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from sporeloom.core import elementary

PARTS = 20_000


def slowest_of(number: int, deviation: float) -> float:
    """Mean of the largest of `number` independent lognormal times of mean 1, whose logarithms have that standard deviation.

    The largest is below the quantile q of one of them with probability q^number.
    """
    normal = NormalDist()
    quantiles = (((part + 0.5) / PARTS) ** (1 / number) for part in range(PARTS))
    logs = [deviation * normal.inv_cdf(min(quantile, 1 - 1e-16)) for quantile in quantiles]
    return float(np.mean(elementary.exp(logs))) / math.exp(deviation**2 / 2)
