# SPDX-License-Identifier: Apache-2.0
"""Drafts by a model: what it reads, takes back and forgets, and that it changes the number of steps and nothing else."""

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from recalling import ENGINE, VOCAB, Recalling, alone, answers, request

from sporeloom.inference.draft_length import DraftLength
from sporeloom.inference.draft_model import ModelDrafter, SharedDrafter
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.inference.speculation import Speculation
from sporeloom.strategy.config import SINGLE_DEVICE


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """Drafts are as long as they may be: the time that these models take is that of Python."""
    monkeypatch.setattr(DraftLength, "best", lambda self, num_rows, most: most)


class Small(Recalling):
    """A draft model: of the same numbers as `Recalling`, or of others; notes the tokens of each step."""

    chunk = 8

    def __init__(self, num_rows, noise=0.0, **more):
        super().__init__(num_rows, **more)
        self.noise, self.fed = noise, []

    def logits_after(self, tokens):
        others = np.random.default_rng([99, *tokens[-2:]]).normal(size=VOCAB)
        return super().logits_after(tokens) + (self.noise * others).astype(np.float32)

    def step(self, chunks, tokens, every=False, drafts=MappingProxyType({})):
        ids = {row: [token, *drafts.get(row, ())] for row, token in tokens.items()}
        self.fed.append({**{row: list(chunk) for row, chunk in chunks.items()}, **ids})
        return super().step(chunks, tokens, every, drafts)


def greedy(text, count):
    """The most likely tokens, one by one."""
    tokens = list(text)
    for _ in range(count):
        tokens.append(int(np.argmax(Recalling(1).logits_after(tokens))))
    return tokens[len(text) :]


def test_the_most_likely_tokens_are_drafted_and_the_last_one_is_not_read():
    small = Small(2)
    drafter = ModelDrafter(small)
    drafter.begin(1, [1, 2])
    expected = greedy([1, 2], 3)
    assert drafter.propose({1: 3}) == {1: expected}
    assert small.rows == {0: [], 1: [1, 2, *expected[:2]]}
    assert [step[1] for step in small.fed] == [[1, 2], expected[:1], expected[1:2]]


@pytest.mark.parametrize("room", [100, 0])
def test_tokens_that_were_right_are_not_read_again(room):
    small = Small(1, room=room)
    drafter = ModelDrafter(small)
    drafter.begin(0, [1, 2])
    (draft,) = drafter.propose({0: 3}).values()
    drafter.add(0, [*draft, 7])
    small.fed.clear()
    expected = greedy([1, 2, *draft, 7], 2)
    assert drafter.propose({0: 2}) == {0: expected}
    read = [token for step in small.fed for token in step[0]]
    assert read == [draft[-1], 7, expected[0]]
    assert len(small.fed) == (2 if room else 3)


@pytest.mark.parametrize("num_right", range(4))
def test_what_was_wrong_is_taken_back(num_right):
    small = Small(1)
    drafter = ModelDrafter(small)
    drafter.begin(0, [1, 2])
    (draft,) = drafter.propose({0: 4}).values()
    other = (draft[num_right] + 1) % VOCAB
    drafter.add(0, [*draft[:num_right], other])
    assert small.rows[0] == [1, 2, *draft[:num_right]]
    small.fed.clear()
    assert drafter.propose({0: 2})[0] == greedy([1, 2, *draft[:num_right], other], 2)
    assert small.fed[0] == {0: [other]}


def test_a_draft_that_was_cut_before_it_was_verified_leaves_a_token_to_read():
    """The token after those that were verified happens to be the drafted one: its logits are needed all the same."""
    small = Small(1)
    drafter = ModelDrafter(small)
    drafter.begin(0, [1, 2])
    (draft,) = drafter.propose({0: 4}).values()
    drafter.add(0, draft[:3])
    assert small.rows[0] == [1, 2, *draft[:2]]
    assert drafter.propose({0: 1}) == {0: draft[3:]}


def test_a_proposal_that_nobody_used_is_made_again():
    drafter = ModelDrafter(Small(1))
    drafter.begin(0, [1, 2])
    assert drafter.propose({0: 3}) == drafter.propose({0: 3}) == {0: greedy([1, 2], 3)}


def test_a_long_prompt_is_read_in_parts_while_the_others_get_drafts():
    small = Small(2)
    drafter = ModelDrafter(small)
    text = [(3 * place) % VOCAB for place in range(20)]
    drafter.begin(0, [1, 2])
    drafter.begin(1, text)
    assert drafter.propose({0: 2, 1: 2}) == {0: greedy([1, 2], 2)}
    assert small.fed[0] == {0: [1], 1: text[:8]}  # with the first token of the other one
    drafter.add(1, [5])
    assert drafter.propose({1: 2}) == {}
    drafter.add(1, [6])
    assert drafter.propose({1: 2}) == {1: greedy([*text, 5, 6], 2)}
    assert [step[1] for step in small.fed if len(step.get(1, ())) > 2] == [text[:8], text[8:16], [*text[16:], 5, 6]]


def test_a_row_that_ended_is_empty_for_the_next_text():
    small = Small(1)
    drafter = ModelDrafter(small)
    drafter.begin(0, [1, 2, 3])
    drafter.propose({0: 4})
    drafter.end(0)
    drafter.end(0)
    assert small.rows == {0: []}
    drafter.begin(0, [4, 5])
    assert drafter.propose({0: 2}) == {0: greedy([4, 5], 2)}
    assert small.rows[0][:2] == [4, 5]


def test_a_text_that_the_model_fails_at_gets_no_drafts_and_its_row_is_overwritten():
    small = Small(1, bad=7)
    drafter = ModelDrafter(small)
    drafter.begin(0, [1, 7])
    assert drafter.propose({0: 3}) == {} and small.cleared == [(0, 0)]
    drafter.add(0, [2])
    assert drafter.propose({0: 3}) == {}
    drafter.end(0)
    drafter.begin(0, [1, 2])
    assert drafter.propose({0: 1}) == {0: greedy([1, 2], 1)}


def mixed(draw):
    for number in range(12):
        prompt = draw.integers(VOCAB, size=draw.integers(1, 30)).tolist()
        sampling = SamplingConfig(temperature=float(draw.choice([0, 0.3, 1])), seed=number)
        end = int(draw.integers(VOCAB)) if draw.random() < 0.3 else None
        yield request(prompt, int(draw.integers(1, 40)), sampling, end=end, num_top=2)


class Faithful(Small):
    """Checks that rows hold texts of the requests and drafts behind them, and nothing of others."""

    prompts: tuple = ()

    def step(self, chunks, tokens, every=False, drafts=MappingProxyType({})):
        found = super().step(chunks, tokens, every, drafts)
        for row in {**chunks, **tokens}:
            held = self.rows[row]
            assert any(held[: len(prompt)] == list(prompt)[: len(held)] for prompt in self.prompts), held
        return found


@pytest.mark.parametrize("room", [100, 3])
@pytest.mark.parametrize("noise", [0.0, 1.0, 100.0])
def test_answers_are_those_without_drafts_to_the_bit(noise, room):
    requests = list(mixed(np.random.default_rng(5)))
    expected = [alone(Recalling(1), each) for each in requests]
    small, decoding, without = Faithful(3, noise), Recalling(3, room=room), Recalling(3)
    small.prompts = tuple(each.prompt for each in requests)
    speculation = Speculation(ModelDrafter(small), 6)
    assert answers(Scheduler(decoding, ENGINE, None, speculation), requests) == expected
    answers(Scheduler(without, ENGINE), requests)
    assert 0 < speculation.accepted <= speculation.drafted and decoding.steps < without.steps
    assert small.rows == {0: [], 1: [], 2: []}


def test_nothing_is_drafted_that_has_no_place_in_the_step():
    small, decoding = Small(2), Recalling(2, room=0)
    speculation = Speculation(ModelDrafter(small), 6)
    answers(Scheduler(decoding, ENGINE, None, speculation), [request([1, 2], 9), request([3], 9)])
    assert small.fed == [] and speculation.drafted == 0
    small, decoding = Small(2), Recalling(2, room=1)
    speculation = Speculation(ModelDrafter(small), 6)
    answers(Scheduler(decoding, ENGINE, None, speculation), [request([1, 2], 9), request([3], 9)])
    assert 0 < speculation.drafted == len(small.fed)


def test_a_model_that_drafts_for_itself_is_right_where_the_most_likely_token_is_chosen():
    speculation = Speculation(ModelDrafter(Small(2)), 8)
    requests = [request([1, 2, 3], 40), request([4], 30)]
    assert answers(Scheduler(Recalling(2), ENGINE, None, speculation), requests)
    assert speculation.accepted == speculation.drafted > 40


def test_a_cancelled_text_leaves_its_row_to_the_next():
    small = Small(1)
    scheduler = Scheduler(Recalling(1), ENGINE, None, Speculation(ModelDrafter(small), 4))
    number = scheduler.submit(request([1, 2, 3], 50))
    for _ in range(4):
        scheduler.step()
    assert small.rows[0]
    scheduler.cancel(number)
    assert small.rows == {0: []}
    following = request([9, 8], 12)
    assert answers(scheduler, [following]) == [alone(Recalling(1), following)]


def test_all_ranks_have_the_drafts_of_the_one_that_makes_them():
    told = []

    def engine(broadcast):
        return SimpleNamespace(strategy=SINGLE_DEVICE, broadcast=lambda array, source: broadcast(array))

    own = ModelDrafter(Small(3))
    first = SharedDrafter(engine(lambda array: told.append(array) or array), own, 3, 4)
    other = SharedDrafter(engine(lambda array: told[-1]), None, 3, 4)
    for each in (first, other):
        each.begin(2, [1, 2])
        each.begin(0, list(range(20)) * 2)
    expected = {2: greedy([1, 2], 3)}
    assert first.propose({2: 3, 0: 2}) == expected  # the other text is still being read
    assert other.propose({2: 3, 0: 2}) == expected
    for each in (first, other):
        each.add(2, [5])
        each.end(0)
    assert first.propose({2: 4}) == other.propose({2: 4}) == {2: greedy([1, 2, 5], 4)}
    assert {array.shape for array in told} == {(3, 4)}


@pytest.mark.parametrize(("draft_s", "drafts_are_worth_it"), [(0.0, True), (1.0, False)])
def test_drafts_that_take_longer_than_steps_end(monkeypatch, draft_s, drafts_are_worth_it):
    monkeypatch.undo()
    small, clock = Small(3, 0.0), SimpleNamespace(now=0.0)
    monkeypatch.setattr("sporeloom.inference.draft_model.time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr("sporeloom.inference.speculation.time", SimpleNamespace(perf_counter=lambda: clock.now))
    decoding = Recalling(3, room=100)

    def slow(step, seconds):
        def timed(*arguments, **more):
            clock.now += seconds
            return step(*arguments, **more)

        return timed

    monkeypatch.setattr(small, "step", slow(small.step, draft_s))
    monkeypatch.setattr(decoding, "step", slow(decoding.step, 0.1))
    requests = [request([1, 2, 3], 200, SamplingConfig(), num_top=0) for _ in range(3)]
    expected = [alone(Recalling(1), each) for each in requests]
    speculation = Speculation(ModelDrafter(small), 6)
    assert answers(Scheduler(decoding, ENGINE, None, speculation), requests) == expected
    assert (speculation.accepted > 300) == drafts_are_worth_it and (speculation.drafted > 100) == drafts_are_worth_it
