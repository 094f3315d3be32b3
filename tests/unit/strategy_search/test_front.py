# SPDX-License-Identifier: Apache-2.0
"""Pareto fronts."""

import random

from sporeloom.strategy_search.front import pareto


def test_a_front_has_all_points_that_no_other_one_dominates():
    random.seed(1)
    points = [tuple(random.randrange(6) for _ in range(3)) for _ in range(150)]
    front = [points[n] for n in pareto(points)]
    expected = {p for p in points if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)}
    assert set(front) == expected and len(front) == len(expected)


def test_of_equal_points_the_first_stays():
    assert pareto([(2, 1), (1, 2), (1, 2), (3, 3)]) == [0, 1]
