# SPDX-License-Identifier: Apache-2.0
"""Checkpoint intervals and run times in closed form, for failures that are equally likely at any time. All in seconds."""

from __future__ import annotations

import math


def young(pause: float, mtbf: float) -> float:
    """Best time of training between checkpoints to first order. Source: Young 1974."""
    return math.sqrt(2 * pause * mtbf)


def daly(pause: float, mtbf: float) -> float:
    """Best time of training between checkpoints to higher order. Source: Daly 2006."""
    if pause >= 2 * mtbf:
        return mtbf
    share = math.sqrt(pause / (2 * mtbf))
    return young(pause, mtbf) * (1 + share / 3 + share**2 / 9) - pause


def expected_time(work: float, interval: float, pause: float, restart: float, mtbf: float) -> float:
    """Mean time of a job of `work` seconds that pauses for a checkpoint after each `interval`, and restarts from the last one
    after a failure; restarts fail, too. Source: Daly 2006."""
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + pause) / mtbf) * work / interval
