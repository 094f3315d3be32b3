# SPDX-License-Identifier: Apache-2.0
"""Choice of the candidates that are simulated."""

import pytest
from tuned import tune_request

from sporeloom.strategy_search.choice import Choice
from sporeloom.strategy_search.scoring import score


@pytest.fixture
def scores(tmp_path):
    return score(tune_request(tmp_path, size="tiny", devices=4, batch=8), 100)


def chosen(choice, number, ratio=lambda one: 1.0):
    found = []
    for _ in range(number):
        found.append(one := choice.next())
        choice.learn(one, int(one.peak_bytes * ratio(one)))
    return found


def test_two_of_three_are_the_fastest_and_the_third_lies_on_the_front(scores):
    found = chosen(Choice(scores.fitting, 2**40), 12)
    fastest = [one for number, one in enumerate(found) if number % 3 < 2]
    assert fastest[:2] == scores.fitting[:2] and len({one.name for one in found}) == 12
    assert min(one.peak_bytes for one in found) < min(one.peak_bytes for one in fastest)
    for one in (found[2], found[5]):
        assert not any(o.seconds < one.seconds and o.peak_bytes < one.peak_bytes for o in scores.fitting)


def test_all_are_chosen_in_the_end(scores):
    choice = Choice(scores.fitting[:20], 2**40)
    assert {one.name for one in chosen(choice, 20)} == {one.name for one in scores.fitting[:20]}
    assert choice.next() is None


def test_candidates_that_simulation_makes_too_large_wait(scores):
    """Without recomputation a step needs thrice its closed form, with it what that says: others fit at once."""
    smallest = min(one.peak_bytes for one in scores.fitting if one.candidate.strategy.recompute is None)
    limit = 2 * smallest
    small = [one for one in scores.fitting if one.peak_bytes <= limit]
    found = chosen(Choice(small, limit), 30, lambda one: 1.0 if one.candidate.strategy.recompute else 3.0)
    meshes = {
        (one.candidate.strategy.mesh, one.candidate.strategy.num_microbatches(one.candidate.accumulate))
        for one in found
    }
    refused = [one for one in found if one.candidate.strategy.recompute is None]
    assert len(refused) <= len(meshes) * 2 < 30
    assert all(one.candidate.strategy.recompute for one in found[-5:])


def test_where_none_is_expected_to_fit_the_smallest_is_next(scores):
    choice = Choice(scores.fitting, 1)
    assert choice.next().peak_bytes == min(one.peak_bytes for one in scores.fitting)


def test_closed_forms_that_are_wrong_everywhere_mislead_once(scores):
    limit = 3 * min(one.peak_bytes for one in scores.fitting)
    small = [one for one in scores.fitting if one.peak_bytes <= limit]
    found = chosen(Choice(small, limit), 8, lambda one: 2.0)
    assert small[0].peak_bytes > limit / 2 and [one for one in found if one.peak_bytes > limit / 2] == [found[0]]
