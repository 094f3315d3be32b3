# SPDX-License-Identifier: Apache-2.0
"""Drafts change the number of steps and nothing else."""

import numpy as np
import pytest
from recalling import ENGINE, VOCAB, Recalling, alone, answers, request

from sporeloom.inference.choosing import Choice, Chosen, packed, unpacked
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.inference.speculation import NgramDrafter, Ngrams, Speculation, cut


def drafting(most=8):
    return Speculation(NgramDrafter(), most)


@pytest.mark.parametrize(
    ("tokens", "count", "draft"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 3, [4, 9, 1]),
        ([1, 2, 5, 1, 2, 6, 1, 2], 2, [6, 1]),  # where it was last
        ([3, 1, 2, 7, 9, 1, 2, 8, 3, 1, 2], 1, [7]),  # the longest
        ([5, 6, 5, 6, 5, 6], 5, [5, 6, 5, 6, 5]),  # it goes on repeating itself
        ([1, 2, 3, 4], 3, []),
        ([1, 1], 3, []),
        ([1], 3, []),
    ],
)
def test_what_followed_the_last_tokens_before_is_drafted(tokens, count, draft):
    assert Ngrams(tokens).propose(count) == draft
    grown = Ngrams(tokens[:1])
    for token in tokens[1:]:
        grown.add([token])
    assert grown.propose(count) == draft


def test_drafts_share_the_room():
    drafts = {0: [1] * 8, 1: [2], 2: [3] * 5}
    assert {row: len(kept) for row, kept in cut(drafts, 9).items()} == {0: 4, 1: 1, 2: 4}
    assert cut(drafts, 100) == drafts
    assert cut(drafts, 0) == {} and sum(map(len, cut(drafts, 2).values())) == 2


def test_a_draft_grows_while_it_is_right_and_shrinks_to_what_was():
    speculation, lengths = drafting(16), []
    speculation.begin(0, [1, 2, 3] * 20)
    for right in (4, 8, 16, 3, 3):
        (draft,) = speculation.draft({0: 100}).values()
        lengths.append(len(draft))
        speculation.verified(
            0, draft, draft if right == len(draft) else [*draft[:right], *draft[right + 1 :][:1]][: right + 1]
        )
        if right < len(draft):  # the text left its course: back to it
            speculation.drafter.begin(0, [1, 2, 3] * 20)
    assert lengths == [4, 8, 16, 16, 3]
    assert (speculation.drafted, speculation.accepted, speculation.num_drafts) == (47, 34, 5)
    assert speculation.draft({0: 2}) and len(speculation.draft({0: 2})[0]) == 2
    speculation.end(0)
    assert speculation.draft({0: 100}) == {}


def mixed(draw):
    for _ in range(12):
        prompt = draw.integers(VOCAB, size=draw.integers(1, 30)).tolist()
        sampling = SamplingConfig(
            temperature=float(draw.choice([0, 0.3, 1])),
            seed=int(draw.integers(9)),
            frequency_penalty=float(draw.choice([0, 0, 0.5])),
        )
        yield request(
            prompt,
            int(draw.integers(1, 40)),
            sampling,
            end=int(draw.integers(VOCAB)) if draw.random() < 0.3 else None,
            num_top=2,
            score_prompt=bool(draw.random() < 0.2),
        )


@pytest.mark.parametrize("room", [100, 3])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_without_drafts_to_the_bit(seed, room):
    requests = list(mixed(np.random.default_rng(seed)))
    expected = [alone(Recalling(1), each) for each in requests]
    decoding, speculation = Recalling(3, room=room), drafting()
    assert answers(Scheduler(decoding, ENGINE, None, speculation), requests) == expected
    assert 0 < speculation.accepted <= speculation.drafted
    without = Recalling(3)
    answers(Scheduler(without, ENGINE), requests)
    assert decoding.steps < without.steps


def test_a_text_that_repeats_itself_takes_few_steps():
    decoding = Recalling(1)
    answers(Scheduler(decoding, ENGINE, None, drafting()), [request([1, 2, 3], 100)])
    assert decoding.steps < 40


def test_a_draft_ends_where_the_text_may():
    each = request([1, 2] * 10, 3)
    decoding = Recalling(1)
    assert answers(Scheduler(decoding, ENGINE, None, drafting()), [each])[0] == alone(Recalling(1), each)


def test_a_processor_with_a_state_sees_each_token_once_and_in_order():
    def watching(seen):
        def process(logits, history):
            seen.append(list(history.generated))
            logits[len(history.generated) % VOCAB] = -np.inf
            return logits

        return process

    plain, drafted = [], []
    expected = alone(Recalling(1), request([1, 2, 1, 2, 1], 60, first=[watching(plain)]))
    scheduler = Scheduler(Recalling(1), ENGINE, None, drafting())
    assert answers(scheduler, [request([1, 2, 1, 2, 1], 60, first=[watching(drafted)])]) == [expected]
    assert drafted == plain and scheduler.speculation.drafted


def test_a_failure_behind_a_draft_is_that_of_its_own_text():
    each = request([5, 6], 200, SamplingConfig(temperature=1.0, seed=3))
    tokens = [token for token, *_ in alone(Recalling(1), each)]
    bad = tokens[60]
    others = request([7, 8, 9], 50)
    expected = [alone(Recalling(1, bad=bad), each), alone(Recalling(1, bad=bad), others)]
    found = answers(Scheduler(Recalling(2, bad=bad), ENGINE, None, drafting()), [each, others])
    assert found == expected and found[0][-1] == "BadLogitsError"


def test_what_a_wrong_draft_left_is_overwritten_where_it_may_be_nan():
    class Wrong(NgramDrafter):
        def propose(self, counts):
            return {row: [11] * count for row, count in counts.items()}

    each = request([1, 2, 3], 8, first=[lambda logits, history: np.where(np.arange(VOCAB) == 11, -np.inf, logits)])
    decoding = Recalling(1, bad=11)
    found = answers(Scheduler(decoding, ENGINE, None, Speculation(Wrong(), 4)), [each])
    assert found == [alone(Recalling(1), each)]
    assert [length for _, length in decoding.cleared] == [4, 5, 6, 7, 8, 9]


def test_choices_survive_the_broadcast():
    chosen = [
        Chosen([Choice(3, -0.5, 0, ((1, -2.0),)), Choice(4, -np.inf, 2)]),
        Chosen([Choice(0, 0.0, -2)], is_tail_finite=False),
        Chosen([Choice(1, -1.5, 0)]),
    ]
    told, sizes = packed(chosen, [2, 4, 1]), [2, 4, 1]
    assert unpacked(told, sizes, chosen) == chosen
    others = unpacked(told, sizes, None)
    assert [[(c.token, c.code) for c in each.choices] for each in others] == [[(3, 0), (4, 2)], [(0, -2)], [(1, 0)]]
    assert [each.is_tail_finite for each in others] == [True, False, True]
