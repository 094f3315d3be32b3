# SPDX-License-Identifier: Apache-2.0
"""What prompts left in the caches outlives their rows, is shared, and changes no answer."""

import numpy as np
import pytest
from recalling import ENGINE, VOCAB, Recalling, alone, answers, request

from sporeloom.inference.prefix_cache import PrefixCache, prefix_cache
from sporeloom.inference.requests import NewToken
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.inference.scheduler import Scheduler

PROMPT = [token % VOCAB for token in range(40)]


def cached_tokens(scheduler, each):
    scheduler.submit(each)
    found = set()
    while not scheduler.is_idle:
        found |= {event.cached_tokens for event in scheduler.step() if isinstance(event, NewToken)}
    (count,) = found
    return count


def open_scheduler(num_rows=1, num_blocks=100, block=4, **more):
    decoding = Recalling(num_rows, **more)
    return Scheduler(decoding, ENGINE, PrefixCache(decoding, num_blocks, block))


def test_a_prompt_outlives_its_row():
    scheduler = open_scheduler()
    assert cached_tokens(scheduler, request(PROMPT, 3)) == 0
    assert cached_tokens(scheduler, request([9] * 30, 3)) == 0  # which takes the row
    scheduler.decoding.chunks.clear()
    assert cached_tokens(scheduler, request([*PROMPT, 1, 2], 3)) == 40
    assert scheduler.decoding.chunks == [2] and scheduler.reused_tokens == 40


def test_a_prompt_is_shared_while_its_row_is_busy():
    scheduler = open_scheduler(2)
    scheduler.submit(request(PROMPT, 50))
    for _ in range(8):
        scheduler.step()
    scheduler.submit(request([*PROMPT, 1], 2))
    events = [event for _ in range(2) for event in scheduler.step()]
    assert {event.cached_tokens for event in events if event.request == 1} == {40}


def test_the_last_token_is_computed_for_its_logits():
    scheduler = open_scheduler()
    cached_tokens(scheduler, request(PROMPT, 1))
    cached_tokens(scheduler, request([9] * 30, 3))
    assert cached_tokens(scheduler, request(PROMPT, 1)) == 36


@pytest.mark.parametrize(("reusable", "next_turn"), [(1, 48), (8, 40)])
def test_what_was_generated_is_kept_where_it_equals_what_a_prompt_gives(reusable, next_turn):
    scheduler = open_scheduler(block=8, reusable=reusable)
    said = [token for token, *_ in answers(scheduler, [request(PROMPT, 12)])[0]]
    cached_tokens(scheduler, request([9] * 30, 3))
    assert cached_tokens(scheduler, request([*PROMPT, *said, 1], 2)) == next_turn


def test_clients_have_prompts_of_their_own():
    scheduler = open_scheduler()
    found = [cached_tokens(scheduler, request(PROMPT, 2, client=client)) for client in (0, 1, 0, 1)]
    assert found == [0, 0, 36, 36]


def test_adapters_and_salts_have_prompts_of_their_own():
    scheduler, found = open_scheduler(), []
    for adapter, salt in ((0, ""), (1, ""), (0, "a"), (1, "a"), (0, ""), (0, "a"), (1, "")):
        found.append(cached_tokens(scheduler, request(PROMPT, 2, adapter=adapter, cache_salt=salt)))
    assert found == [0, 0, 0, 0, 36, 36, 36]


def test_the_blocks_used_last_are_kept_and_none_without_the_one_before_it():
    decoding = Recalling(1)
    cache = PrefixCache(decoding, 4, 2)

    def keep(tokens):
        decoding.rows[0] = list(tokens)
        cache.keep(0, None, tokens)
        return [cache.num_found(0, None, each) for each in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 10])]

    assert keep([1, 2, 3, 4]) == [4, 2, 0]
    assert keep([1, 2, 5, 6]) == [4, 4, 0]
    assert keep([7, 8]) == [4, 4, 2]
    assert cache.restore(0, None, [1, 2, 3, 4], 0) == 4 and decoding.rows[0] == [1, 2, 3, 4]
    assert keep([7, 8, 9, 10]) == [4, 2, 4]  # 5, 6 was used longest ago
    assert keep([1, 2, 5, 6]) == [2, 4, 4] or len(cache) == 4
    assert keep([0] * 20) == [0, 0, 0] and len(cache) == 4  # as much of a long one as there is room for


def test_a_row_that_holds_a_part_is_given_the_rest():
    decoding = Recalling(1)
    cache = PrefixCache(decoding, 10, 4)
    decoding.rows[0] = list(range(12))
    cache.keep(0, None, list(range(12)))
    decoding.trim(0, 6)
    assert cache.restore(0, None, list(range(12)), 6) == 12 and decoding.rows[0] == list(range(12))
    assert cache.restore(0, None, list(range(4)), 12) == 12


def test_rows_of_a_replica_find_what_its_rows_left():
    decoding = Recalling(4)
    decoding.num_replicas = 2
    cache = PrefixCache(decoding, 10, 4)
    decoding.rows[1] = list(range(8))
    cache.keep(1, None, list(range(8)))
    assert [cache.num_found(row, None, list(range(8))) for row in range(4)] == [8, 8, 0, 0]


@pytest.mark.parametrize("reusable", [1, 8])
@pytest.mark.parametrize("num_blocks", [3, 100])
def test_answers_are_those_of_a_cold_start_to_the_bit(reusable, num_blocks):
    draw, requests = np.random.default_rng(7), []
    for _ in range(40):
        begin = PROMPT[: int(draw.integers(40))]
        prompt = [*begin, *draw.integers(VOCAB, size=draw.integers(1, 12)).tolist()]
        sampling = SamplingConfig(temperature=float(draw.choice([0, 1])), seed=int(draw.integers(9)))
        requests.append(request(prompt, int(draw.integers(1, 12)), sampling, cache_salt=str(draw.integers(2))))
    expected = [alone(Recalling(1), each) for each in requests]
    scheduler = open_scheduler(3, num_blocks, 8, reusable=reusable)
    assert answers(scheduler, requests) == expected
    assert scheduler.reused_tokens > 0 and len(scheduler.cache) <= num_blocks


def test_a_failed_text_leaves_nothing():
    scheduler = open_scheduler(bad=3)
    prompt = [1, 2, 4, 5, 6, 7, 8, 3]
    assert answers(scheduler, [request(prompt, 2)]) == [["BadLogitsError"]]
    assert len(scheduler.cache) == 0 and scheduler.decoding.cleared == [(0, 0)]


def test_there_is_none_without_room_or_where_rows_cannot_be_reused():
    assert prefix_cache(Recalling(1), 1000, 15_999) is None
    assert prefix_cache(Recalling(1), 1000, 16_000).num_blocks == 1
    assert prefix_cache(Recalling(1, reusable=64), 1000, 640_000).block == 64
    assert prefix_cache(Recalling(1, reusable=0), 1000, 10**9) is None
