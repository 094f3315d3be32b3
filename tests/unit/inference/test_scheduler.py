# SPDX-License-Identifier: Apache-2.0
"""Requests that come and go, on a decoding whose logits are a function of the tokens a row holds: no MindSpore graph."""

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from sporeloom.inference.pooling import PooledStates
from sporeloom.inference.requests import Failure, NewToken, PromptEmbedding, PromptScores, Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.strategy.config import SINGLE_DEVICE

ENGINE = SimpleNamespace(
    strategy=SINGLE_DEVICE, is_log_rank=True, in_last_stage=True, broadcast=lambda array, source: array
)
VOCAB = 50


def logits_after(tokens):
    """(V,), different for all beginnings of texts."""
    return np.random.default_rng([len(tokens), *tokens]).normal(size=VOCAB).astype(np.float32)


class Chunked:
    """Takes prompts in chunks of 4; notes what it did."""

    cache_bytes, reusable = 0, 4

    def __init__(self, num_rows):
        self.num_rows = num_rows
        self.rows = {row: [] for row in range(num_rows)}
        self.adapters = dict.fromkeys(range(num_rows), 0)
        self.calls, self.cleared = [], []

    def next_chunks(self, waiting, is_alone):
        row = next(iter(waiting))
        return {row: waiting[row][:4]}

    def step(self, chunks, tokens, every=False, drafts=MappingProxyType({})):
        assert len(chunks) <= 1
        self.calls += [("chunk", row, len(ids)) for row, ids in chunks.items()]
        self.calls += [("tokens", *tokens)] if tokens else []
        found = {}
        for row, ids in {**chunks, **{row: [token] for row, token in tokens.items()}}.items():
            logits = []
            for token in ids:
                self.rows[row].append(token)
                logits.append(logits_after(self.rows[row]))
            found[row] = np.stack(logits) if every and row in chunks else logits[-1]
        return found

    def states(self, chunks):
        return {row: self.step({row: ids}, {}, every=True)[row] for row, ids in chunks.items()}

    def trim(self, row, length):
        del self.rows[row][length:]

    def clear(self, row):
        self.trim(row, 0)
        self.cleared.append(row)

    def use_adapter(self, row, adapter):
        self.adapters[row] = adapter


def request(prompt, most=5, sampling=None, stream=0, **more):
    return Request(prompt, most, Sampler(sampling or SamplingConfig()), lambda tokens: False, stream, **more)


def finished(scheduler, found=None):
    """Tokens of each request, when all are done."""
    found = {} if found is None else found
    while not scheduler.is_idle:
        book(scheduler.step(), found)
    return found


def book(events, found):
    for event in events:
        if isinstance(event, NewToken):
            found.setdefault(event.request, []).append(event.token)


def alone(asked):
    scheduler = Scheduler(Chunked(1), ENGINE)
    scheduler.submit(asked)
    return finished(scheduler).get(0)


@pytest.mark.parametrize("seed", range(5))
def test_whoever_comes_and_goes_each_request_gets_what_it_gets_alone(seed):
    draw, found, asked, cancelled = np.random.default_rng(seed), {}, [], set()
    scheduler = Scheduler(Chunked(3), ENGINE)
    while len(asked) < 40 or not scheduler.is_idle:
        for _ in range(int(draw.integers(3)) if len(asked) < 40 else 0):
            prompt = [*([7] * 8)[: int(draw.integers(9))], *draw.integers(VOCAB, size=draw.integers(1, 9)).tolist()]
            sampling = SamplingConfig(temperature=float(draw.choice([0, 1])), seed=int(draw.integers(9)))
            asked.append(request(prompt, int(draw.integers(1, 7)), sampling, int(draw.integers(3))))
            assert scheduler.submit(asked[-1]) == len(asked) - 1
        if asked and draw.random() < 0.1:
            cancelled.add(int(draw.integers(len(asked))))
            scheduler.cancel(max(cancelled))
        book(scheduler.step(), found)
    assert scheduler.reused_tokens > 0
    for number, each in enumerate(asked):
        if number not in cancelled:
            assert found[number] == alone(each)


def test_a_long_prompt_lets_the_others_go_on_between_its_chunks():
    decoding = Chunked(2)
    scheduler = Scheduler(decoding, ENGINE)
    scheduler.submit(request([1], 20))
    scheduler.step()
    scheduler.submit(request(list(range(16)), 1))
    for _ in range(4):
        scheduler.step()
    assert decoding.calls[1:] == [("chunk", 1, 4), ("tokens", 0)] * 4


def test_a_cancelled_request_frees_its_row_at_once():
    scheduler = Scheduler(Chunked(1), ENGINE)
    first, second = scheduler.submit(request([1], 20)), scheduler.submit(request([2], 2))
    scheduler.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.cancel(first)
    assert [event.request for event in scheduler.step()] == [second]
    third = scheduler.submit(request([3], 2))
    scheduler.cancel(third)  # while it waits
    assert finished(scheduler).keys() == {second}


def test_an_equal_beginning_is_not_worked_through_again():
    decoding = Chunked(2)
    scheduler = Scheduler(decoding, ENGINE)
    prompt = list(range(10))
    scheduler.submit(request(prompt, 3))
    before = finished(scheduler)[0]
    decoding.calls.clear()
    scheduler.submit(request([*prompt[:9], 30], 3))
    scheduler.submit(request(prompt[:8], 3))  # equal to the last token, which is worked through for its logits
    found = finished(scheduler)
    assert decoding.calls[0] == ("chunk", 0, 2)
    assert scheduler.reused_tokens == 8  # the other row held nothing
    assert found[1] == alone(request([*prompt[:9], 30], 3)) and found[2] == alone(request(prompt[:8], 3))
    scheduler.submit(request(prompt, 3))
    assert finished(scheduler)[3] == before


def test_where_any_beginning_may_be_reused_so_is_what_was_generated():
    decoding = Chunked(1)
    decoding.reusable = 1
    scheduler = Scheduler(decoding, ENGINE)
    scheduler.submit(request([5, 6, 7], 4))
    said = finished(scheduler)[0]
    scheduler.submit(request([5, 6, 7, *said, 8], 2))  # the next turn of a chat
    found = finished(scheduler)
    assert scheduler.reused_tokens == 6  # the last token that was chosen has not been given to the model
    assert found[1] == alone(request([5, 6, 7, *said, 8], 2))


def test_a_conversation_is_not_forgotten_for_a_greeting_in_common():
    decoding = Chunked(2)
    decoding.reusable = 1
    scheduler = Scheduler(decoding, ENGINE)
    for prompt in ([5, *range(20)], [5, 30]):
        scheduler.submit(request(prompt, 2))
        finished(scheduler)
    assert scheduler.reused_tokens == 0  # the second took the row that held nothing
    scheduler.submit(request([5, *range(20), 40], 2))
    finished(scheduler)
    assert scheduler.reused_tokens == 21


def test_what_one_adapter_worked_through_is_nothing_for_another():
    decoding = Chunked(1)
    scheduler = Scheduler(decoding, ENGINE)
    reused = []
    for adapter in (1, 1, 2, 0, 0):
        scheduler.submit(request(list(range(10)), 3, adapter=adapter))
        finished(scheduler)
        reused.append(scheduler.reused_tokens)
        assert decoding.adapters == {0: adapter}
    assert reused == [0, 8, 8, 8, 16]


def test_tokens_are_the_same_where_nobody_needs_their_log_probabilities():
    found = {}
    for has_scores in (True, False):
        scheduler = Scheduler(Chunked(2), ENGINE)
        scheduler.submit(request([3, 1, 4], 6, SamplingConfig(temperature=1.0, seed=5), has_scores=has_scores))
        events = []
        while not scheduler.is_idle:
            events += scheduler.step()
        found[has_scores] = [event.token for event in events]
        assert all(np.isnan(event.log_probability) != has_scores for event in events)
    assert found[True] == found[False]


def test_tokens_of_a_prompt_are_scored_where_that_is_asked_for():
    prompt = [3, 1, 4, 1, 5, 9]
    scheduler = Scheduler(Chunked(2), ENGINE)
    scheduler.submit(request(prompt, 0, score_prompt=True, num_top=2))
    scheduler.submit(request(prompt, 2, score_prompt=True))
    events = []
    while not scheduler.is_idle:
        events += scheduler.step()
    first, second = (event for event in events if isinstance(event, PromptScores))
    assert (first.finish_reason, second.finish_reason) == ("length", None)
    for place, score in enumerate(first.scores, 1):
        logits = logits_after(prompt[:place]).astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum())
        assert score.token == prompt[place]
        assert score.log_probability == pytest.approx(log_probs[prompt[place]], abs=1e-6)
        assert [token for token, _ in score.top] == np.argsort(-log_probs)[:2].tolist()
    assert len(first.scores) == 5
    assert [s.log_probability for s in second.scores] == [s.log_probability for s in first.scores]
    assert [event.token for event in events if isinstance(event, NewToken)] == alone(request(prompt, 2))


def test_texts_to_embed_share_the_rows_with_others_and_leave_nothing_in_them():
    """Of two rows. The text is long: it is read in parts, between tokens of the other."""
    text = list(range(1, 12))

    def embedded(pooling, others):
        decoding = Chunked(2)
        scheduler, vectors, tokens = Scheduler(decoding, ENGINE), {}, {}
        for prompt in others:
            scheduler.submit(request(prompt, 6))
        wanted = scheduler.submit(Request(text, 0, Sampler(SamplingConfig()), lambda tokens: False, pooling=pooling))
        after = scheduler.submit(request(text, 3))
        while not scheduler.is_idle:
            for event in scheduler.step():
                if isinstance(event, PromptEmbedding):
                    vectors[event.request] = event.vector
                else:
                    assert isinstance(event, NewToken), event
                    tokens.setdefault(event.request, []).append(event.token)
                    assert event.request != after or event.cached_tokens == 0
        assert [*vectors] == [wanted]
        return vectors[wanted].tobytes(), tokens[after]

    states = np.stack([logits_after(text[:count]) for count in range(1, 12)])
    for pooling in ("last", "mean"):
        alone = embedded(pooling, [])
        pooled = PooledStates(pooling)
        pooled.add(states)
        assert alone[0] == pooled.vector().tobytes()
        assert embedded(pooling, [[5, 6], [7, 8, 9, 10, 11], [1]]) == alone


def test_a_text_whose_states_are_not_finite_fails_alone():
    decoding = Chunked(1)
    decoding.states = lambda chunks: {row: np.full((len(ids), 4), np.nan) for row, ids in chunks.items()}
    scheduler = Scheduler(decoding, ENGINE)
    failing = scheduler.submit(Request([1, 2], 0, Sampler(SamplingConfig()), lambda tokens: False, pooling="mean"))
    (failure,) = scheduler.step()
    assert isinstance(failure, Failure) and failure.request == failing and decoding.cleared == [0]
    scheduler.submit(request([1, 2], 2))
    assert [type(scheduler.step()[0]) for _ in range(2)] == [NewToken] * 2
