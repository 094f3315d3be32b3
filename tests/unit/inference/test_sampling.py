# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from sporeloom.inference.sampling import (
    BadLogitsError,
    History,
    NoTokenError,
    Sampler,
    SamplingConfig,
    add_bias,
    ban,
    ban_until,
    keep_top_k,
    keep_top_p,
    penalize_frequency,
    penalize_repetition,
    scale,
    score_token,
)

NOTHING = History([], [])


def logits_of(*probabilities):
    return np.log(np.asarray(probabilities, np.float64))


def kept(logits):
    return np.flatnonzero(logits > -np.inf).tolist()


def test_temperature_zero_takes_the_likeliest():
    assert Sampler(SamplingConfig()).choose(logits_of(0.2, 0.5, 0.3), NOTHING) == 1


def test_rows_beyond_the_vocabulary_are_never_chosen():
    sampler = Sampler(SamplingConfig(), vocab_size=2)
    assert sampler.choose(logits_of(0.1, 0.2, 0.7), NOTHING) == 1


def test_top_k_keeps_the_k_likeliest():
    assert kept(keep_top_k(2)(logits_of(0.1, 0.4, 0.2, 0.3), NOTHING)) == [1, 3]
    assert kept(keep_top_k(9)(logits_of(0.5, 0.5), NOTHING)) == [0, 1]


@pytest.mark.parametrize(("p", "expected"), [(0.4, [1]), (0.41, [1, 3]), (0.7, [1, 3]), (0.71, [1, 2, 3]), (1e-9, [1])])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, expected):
    assert kept(keep_top_p(p)(logits_of(0.1, 0.4, 0.2, 0.3), NOTHING)) == expected


def test_top_p_after_top_k_counts_what_top_k_left():
    logits = keep_top_k(2)(logits_of(0.1, 0.4, 0.2, 0.3), NOTHING)
    assert kept(keep_top_p(0.57)(logits, NOTHING)) == [1]  # 0.4 / 0.7 is 0.571


def test_banned_tokens_are_impossible_for_ever_or_for_a_while():
    assert kept(ban([0, 2])(np.zeros(3), NOTHING)) == [1]
    assert kept(ban_until(2, [0])(np.zeros(2), History([], [1]))) == [1]
    assert kept(ban_until(2, [0])(np.zeros(2), History([], [1, 1]))) == [0, 1]


def test_frequency_counts_every_time_and_presence_once_of_the_generated_tokens_alone():
    changed = penalize_frequency(0.5, 2.0)(np.zeros(3), History(prompt=[2], generated=[0, 0, 1]))
    np.testing.assert_allclose(changed, [-3.0, -2.5, 0.0])


def test_the_repetition_penalty_lowers_logits_of_either_sign_of_prompt_and_output():
    changed = penalize_repetition(2.0)(np.asarray([4.0, -4.0, 4.0]), History(prompt=[0, 0], generated=[1]))
    np.testing.assert_allclose(changed, [2.0, -8.0, 4.0])


def test_a_temperature_divides():
    np.testing.assert_allclose(scale(2.0)(np.asarray([2.0, 4.0]), NOTHING), [1.0, 2.0])


def test_samples_follow_the_probabilities():
    sampler = Sampler(SamplingConfig(temperature=1.0, seed=5))
    logits = logits_of(0.1, 0.6, 0.3)
    drawn = [sampler.choose(logits, NOTHING, stream) for stream in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, [0.1, 0.6, 0.3], atol=0.03)


def test_a_sample_follows_from_seed_stream_and_length_alone():
    config = SamplingConfig(temperature=1.0, seed=7)
    logits = np.zeros(1000)
    first, again = Sampler(config), Sampler(config)
    again.choose(logits, NOTHING, stream=3)  # what was drawn before does not matter
    assert first.choose(logits, NOTHING) == again.choose(logits, NOTHING)
    others = {
        first.choose(logits, NOTHING, stream=1),
        first.choose(logits, History([], [5])),
        Sampler(SamplingConfig(temperature=1.0, seed=8)).choose(logits, NOTHING),
    }
    assert len(others - {first.choose(logits, NOTHING)}) == 3


def test_all_processors_together_leave_the_models_logits_alone():
    config = SamplingConfig(
        temperature=0.7, top_k=3, top_p=0.9, frequency_penalty=1.0, repetition_penalty=1.5, banned_tokens=(0,)
    )
    logits = np.asarray([9.0, 1.0, 2.0, 3.0, 2.5], np.float32)
    before = logits.copy()
    assert Sampler(config, [4]).choose(logits, History([1], [3, 3])) in (2, 4)
    np.testing.assert_array_equal(logits, before)


def test_log_probability_is_of_the_softmax():
    score = score_token(logits_of(0.25, 0.5, 0.25) + 3, 0, num_top=2)
    assert score.log_probability == pytest.approx(np.log(0.25))
    assert [token for token, _ in score.top] == [1, 0]  # of equals the one with the lower id
    assert score.top[0][1] == pytest.approx(np.log(0.5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "--temperature must be at least 0, got -0.1"),
        ({"temperature": float("nan")}, "--temperature must be a finite number"),
        ({"top_p": 0.0}, "--top-p must be in (0, 1], got 0.0"),
        ({"top_p": 1.5}, "--top-p must be in (0, 1], got 1.5"),
        ({"top_k": -1}, "--top-k must be at least 0"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty must be above 0"),
        ({"banned_tokens": (3, 10)}, "--banned-tokens: 10 is outside the vocabulary of 10"),
        ({"seed": -1}, "--seed must be at least 0"),
    ],
)
def test_what_is_out_of_range_is_named(values, message):
    (problem,) = SamplingConfig(**values).problems(vocab_size=10)
    assert message in problem


def test_the_defaults_are_in_range():
    assert list(SamplingConfig().problems(10)) == []


LOGITS = np.asarray([1.0, 5.0, 3.0, -2.0], np.float32)
HUGE = np.float32(3e38)  # near the largest number of float32
SEEN = History([1, 2], [])
INF, NAN = math.inf, math.nan


def choices(config, logits=LOGITS, history=NOTHING, first=()):
    """What twenty seeds choose."""
    values = np.asarray(logits, np.float32)
    return {
        Sampler(SamplingConfig(**{"seed": seed, **config}), (), None, first).choose(values, history)
        for seed in range(20)
    }


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 2}, {"top_p": 5e-324, "top_k": 3}])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-308, 1e-300, 1e-10, 9e-6, 1e-5, 1e-3])
def test_a_low_temperature_takes_the_likeliest(temperature, more):
    assert choices({"temperature": temperature, **more}) == {1}


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0.0, True), (5e-324, True), (9.99e-6, True), (1e-5, False), (1.0, False)]
)
def test_below_1e_5_sampling_is_greedy(temperature, is_greedy):
    assert SamplingConfig(temperature=temperature).is_greedy == is_greedy


@pytest.mark.parametrize(
    ("config", "logits", "history", "expected"),
    [
        # exp(-1.8e308 + 1.8e308), 0 / 0 and their like, where the exact answer is one token or all alike
        ({"temperature": 1.0, "top_p": 5e-324}, LOGITS, NOTHING, {1}),
        ({"temperature": 1.0, "top_p": 1e-308}, [0, 0, 0, 0], NOTHING, {0}),
        ({"temperature": 1e308}, LOGITS, NOTHING, {0, 1, 2, 3}),
        ({"temperature": 1.7e308}, [HUGE, -HUGE], NOTHING, {0, 1}),
        ({"temperature": 1e-5}, [HUGE, -HUGE, 0], NOTHING, {0}),
        ({"temperature": 1.0}, [HUGE, HUGE, -HUGE], NOTHING, {0, 1}),
        ({"temperature": 1.0}, [-INF, 2, -INF, -INF], NOTHING, {1}),
        ({"temperature": 0.0}, [-INF, -INF, -HUGE, -INF], NOTHING, {2}),
        # a tiny penalty makes seen tokens with positive logits all but certain, the likeliest of them first
        ({"repetition_penalty": 1e-320}, LOGITS, SEEN, {1}),
        ({"repetition_penalty": 5e-324}, [9, 2, 3, 0], SEEN, {2}),
        ({"repetition_penalty": 1e-300, "temperature": 1.0}, LOGITS, SEEN, {1}),
        ({"repetition_penalty": 1e-320, "temperature": 1e-5}, [HUGE, 2, 3, 0], SEEN, {2}),
        ({"repetition_penalty": 1e-320}, [-9, -2, -3, -9], SEEN, {1}),
        ({"repetition_penalty": 1.7e308}, [1, 5, -3, 0.5], SEEN, {0}),
        ({"repetition_penalty": 1.7e308}, [-1, -5, -3, -7], History([0, 1, 2, 3], []), {0}),
        # penalties whose multiples overflow still ban or force, and leave a distribution
        ({"frequency_penalty": 1.7e308}, LOGITS, History([], [1, 1, 1]), {2}),
        ({"frequency_penalty": -1.7e308}, LOGITS, History([], [3, 3]), {3}),
        (
            {"frequency_penalty": 1.7e308, "presence_penalty": -1.7e308},
            LOGITS,
            History([], [1, 1]),
            {2},
        ),
        ({"frequency_penalty": 1.7e308, "temperature": 1.0}, [0, 0], History([], [0, 0, 1, 1]), {0, 1}),
        ({"frequency_penalty": -1.7e308, "banned_tokens": (1,)}, LOGITS, History([], [1, 1, 3]), {3}),
    ],
)
def test_numbers_that_overflow_leave_the_exact_choice(config, logits, history, expected):
    with np.errstate(invalid="raise", divide="raise"):
        found = choices(config, logits, history)
    assert found == expected


@pytest.mark.parametrize(
    ("bias", "greedy", "possible"),
    [
        ({1: -100.0}, 2, {0, 2, 3}),
        ({3: 100.0}, 3, {3}),
        ({0: -100, 1: -100, 2: -100}, 3, {3}),
        ({0: -100, 1: -100, 2: -100, 3: -100}, 1, {0, 1, 2, 3}),
    ],
)
def test_a_bias_of_the_largest_size_decides(bias, greedy, possible):
    assert choices({"temperature": 0.0}, first=[add_bias(bias)]) == {greedy}
    assert choices({"temperature": 1.0}, first=[add_bias(bias)]) <= possible


def test_tokens_beyond_the_tokenizers_vocabulary_change_nothing():
    config = SamplingConfig(banned_tokens=(2,), min_new_tokens=1, repetition_penalty=2.0)
    assert Sampler(config, (1, 2), vocab_size=2).choose(LOGITS, History([3, 2, 0], [])) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits", [[NAN] * 4, [NAN, 5, 3, -2], [1, 5, 3, NAN], [1, INF, 3, -2], [INF, -INF, 0, NAN], [-INF] * 4]
)
def test_what_is_no_distribution_is_an_error_of_the_model(logits, temperature):
    values = np.asarray(logits, np.float32)
    with pytest.raises(BadLogitsError, match="NaN or infinite"):
        Sampler(SamplingConfig(temperature=temperature)).choose(values, NOTHING)
    with pytest.raises(BadLogitsError):
        Sampler(SamplingConfig(temperature=temperature), vocab_size=2).choose(values, NOTHING)  # scores are of all
    with pytest.raises(BadLogitsError):
        score_token(values, 1, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("config", "stops", "size"),
    [
        ({"min_new_tokens": 4}, (0, 1, 2, 3), None),
        ({"min_new_tokens": 1}, (0, 1), 2),
        ({"min_new_tokens": 1, "banned_tokens": (0, 2)}, (1, 3), None),
        ({"banned_tokens": (0, 1, 2, 3)}, (), None),
    ],
)
def test_where_every_token_is_forbidden_none_is_chosen(config, stops, size, temperature):
    chosen = SamplingConfig(temperature=temperature, **config)
    assert chosen.leaves_none(stops, size or 4)
    with pytest.raises(NoTokenError, match="no token is left"):
        Sampler(chosen, stops, size).choose(LOGITS, NOTHING)


@pytest.mark.parametrize(
    ("config", "stops"),
    [
        ({}, (0, 1, 2, 3)),
        ({"min_new_tokens": 1}, (0, 1, 2)),
        ({"min_new_tokens": 1, "banned_tokens": (0, 1)}, (1, 2, 7)),
        ({"banned_tokens": (0, 1, 2, 9)}, ()),
    ],
)
def test_one_token_left_is_chosen(config, stops):
    assert not SamplingConfig(**config).leaves_none(stops, 4)
    Sampler(SamplingConfig(**config), stops).choose(LOGITS, NOTHING)


def test_more_likeliest_tokens_than_there_are_are_all():
    assert [token for token, _ in score_token(LOGITS, 0, num_top=20).top] == [1, 2, 0, 3]
