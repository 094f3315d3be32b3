# SPDX-License-Identifier: Apache-2.0
"""Lengths of drafts are those with the most tokens per second."""

import pytest

from sporeloom.inference.draft_length import PROBE_EVERY, DraftLength


def measured(num_rows, fixed_s, token_s, draft_s, num_right, of=8, rounds=40):
    """After rounds of one step without drafts and one with a draft of `of` tokens a row, of which some are right."""
    length = DraftLength()
    for _ in range(rounds):
        length.stepped(num_rows, fixed_s + token_s * num_rows)
        length.drafted(num_rows, of, of * draft_s)
        length.stepped(num_rows * (1 + of), fixed_s + token_s * num_rows * (1 + of))
        for _ in range(num_rows):
            length.verified(of, num_right)
    return length


@pytest.mark.parametrize(
    ("num_rows", "fixed_s", "token_s", "draft_s", "num_right", "expected"),
    [
        (1, 1.0, 0.0, 0.0, 4, 8),  # free drafts
        (1, 1.0, 0.0, 10.0, 4, 0),  # a draft costs ten steps
        (4, 1.0, 1.0, 0.0, 0, 0),  # none is right, and each makes the step longer
        (1, 1.0, 0.0, 0.1, 8, 8),  # all are right
        (4, 0.1, 1.0, 0.1, 4, 0),  # the step is bound by its products
    ],
)
def test_extremes(num_rows, fixed_s, token_s, draft_s, num_right, expected):
    assert measured(num_rows, fixed_s, token_s, draft_s, num_right).best(num_rows, 8) == expected


def test_the_length_between_has_the_most_tokens_per_second():
    # 4 of 5 right, a draft costs a tenth of a step: (1 - 0.8^(k + 1)) / (1 - 0.8) / (1 + 0.1 k) is largest at k = 5.
    speeds = [(1 - 0.8 ** (k + 1)) / (1 - 0.8) / (1 + 0.1 * k) for k in range(9)]
    expected = max(range(9), key=speeds.__getitem__)
    assert 0 < expected < 8
    assert measured(1, 1.0, 0.0, 0.1, 4).best(1, 8) == expected


def test_it_does_not_limit_before_it_has_measured():
    length = DraftLength()
    assert length.best(4, 8) == 8
    length.stepped(4, 1.0)
    length.drafted(4, 8, 100.0)
    assert length.best(4, 8) == 8


def test_where_no_draft_pays_one_is_tried_now_and_then_until_it_is_verified():
    length = measured(1, 1.0, 0.0, 10.0, 4)
    assert [length.best(1, 8) for _ in range(PROBE_EVERY + 2)] == [0] * PROBE_EVERY + [1, 1]
    length.verified(1, 1)
    assert length.best(1, 8) == 0


def test_texts_that_become_predictable_are_drafted_again():
    length = measured(1, 1.0, 0.05, 0.3, 0)
    assert length.best(1, 8) == 0
    for _ in range(60):
        length.verified(1, 1)
    assert length.best(1, 8) > 1


def test_steps_whose_time_grows_faster_than_their_tokens_take_no_negative_time():
    length = DraftLength()
    for _ in range(40):
        for num_tokens in (4, 8, 16):
            length.stepped(num_tokens, num_tokens**2 / 1000)
        length.drafted(1, 8, 0.0)
        length.verified(8, 0)
    assert length.best(1, 8) == 0
