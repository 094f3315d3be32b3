# SPDX-License-Identifier: Apache-2.0
"""Pareto fronts."""

from __future__ import annotations

from collections.abc import Sequence


def pareto(points: Sequence[Sequence[float]]) -> list[int]:
    """Positions of the points that no other one dominates, in their order; of equal points the first.

    Args:
        points: objectives, of each the smaller the better.
    """
    front: list[int] = []
    for number in sorted(range(len(points)), key=lambda n: (tuple(points[n]), n)):  # nothing later dominates it
        if not any(all(a <= b for a, b in zip(points[kept], points[number], strict=True)) for kept in front):
            front.append(number)
    return sorted(front)
