# SPDX-License-Identifier: Apache-2.0
"""Every schedule equals its closed formula; flags that contradict it are refused."""

import math

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.train.checks import check
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.schedules import ScheduleOptions, learning_rate

HIGH, LOW, WARMUP, DECAY = 0.8, 0.2, 10, 50


def rates(schedule, steps=range(1, 71), **options):
    return [learning_rate(step, HIGH, LOW, WARMUP, DECAY, schedule, ScheduleOptions(**options)) for step in steps]


def wanted(fraction):
    """Warm-up, then LOW plus this fraction of the rest, a function of the step, then LOW."""
    found = []
    for step in range(1, 71):
        if step < WARMUP:
            found.append(HIGH * step / WARMUP)
        else:
            found.append(LOW + (HIGH - LOW) * fraction(step) if step < DECAY else LOW)
    return pytest.approx(found, rel=1e-12)


def test_constant_and_linear():
    assert rates("constant") == [HIGH * min(step, WARMUP) / WARMUP for step in range(1, 71)]
    assert rates("linear") == wanted(lambda step: (DECAY - step) / (DECAY - WARMUP))
    assert rates("linear", [WARMUP, 30, DECAY]) == pytest.approx([HIGH, 0.5, LOW])


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_polynomial(power):
    assert rates("polynomial", power=power) == wanted(lambda step: ((DECAY - step) / (DECAY - WARMUP)) ** power)


@pytest.mark.parametrize("cycles", [1, 4])
def test_cosine_with_restarts(cycles):
    length = (DECAY - WARMUP) // cycles
    assert rates("cosine-restarts", cycles=cycles) == wanted(
        lambda step: (1 + math.cos(math.pi * ((step - WARMUP) % length) / length)) / 2
    )
    begins = [WARMUP + length * cycle for cycle in range(cycles)]
    assert rates("cosine-restarts", begins, cycles=cycles) == [pytest.approx(HIGH)] * cycles


def test_a_cycle_begins_exactly_whatever_their_number():
    found = [
        learning_rate(step, 1.0, 0.0, 0, 21, "cosine-restarts", ScheduleOptions(cycles=7)) for step in range(3, 21, 3)
    ]
    assert found == [1.0] * 6


@pytest.mark.parametrize(
    ("shape", "fraction"),
    [
        ("linear", lambda d: 1 - d),
        ("cosine", lambda d: (1 + math.cos(math.pi * d)) / 2),
        ("1-sqrt", lambda d: 1 - math.sqrt(d)),
    ],
)
def test_warmup_stable_decay(shape, fraction):
    found = rates("wsd", decay_fraction=0.4, decay_shape=shape)
    assert found == wanted(lambda step: 1.0 if step <= 30 else fraction((step - 30) / 20))
    assert found[WARMUP - 1 : 30] == [pytest.approx(HIGH)] * 21
    assert found[30] < HIGH


def checked(write, **flags):
    return check(TrainConfig(data=write("a.txt", "text"), **flags), num_processes=1)


def test_flags_reach_the_rate_of_an_update(write):
    run = checked(
        write,
        **{"steps": 100, "schedule": "wsd", "decay_fraction": 0.5, "decay_shape": "1-sqrt", "warmup_steps": 5},
        **{"learning_rate": 1.0, "min_learning_rate": 0.0},
    )
    assert [run.rate_of(update) for update in (1, 5, 50, 75, 100)] == pytest.approx([0.2, 1, 1, 1 - math.sqrt(0.5), 0])
    assert run.config.schedule_settings() == {"schedule": "wsd", "decay_fraction": 0.5, "decay_shape": "1-sqrt"}
    assert checked(write).config.schedule_settings() == {"schedule": "cosine"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"decay_fraction": 0.2}, "--decay-fraction 0.2: of --schedule wsd alone, not cosine; leave it out"),
        ({"schedule": "wsd", "restart_cycles": 3}, "--restart-cycles 3: of --schedule cosine-restarts alone, not wsd"),
        ({"schedule": "linear", "polynomial_power": 3.0}, "--polynomial-power 3.0: of --schedule polynomial alone"),
        ({"schedule": "constant", "decay_steps": 9}, "--decay-steps 9: --schedule constant never decays"),
        ({"schedule": "constant", "min_learning_rate": 0.1}, "--min-learning-rate 0.1: --schedule constant never"),
        ({"learning_rate": 0.1, "min_learning_rate": 0.2}, "--min-learning-rate 0.2 is above the maximum"),
        ({"schedule": "linear", "warmup_steps": 50}, "the warm-up of 50 steps leaves none to decay until step 50"),
        (
            {"schedule": "wsd", "warmup_steps": 20, "decay_fraction": 0.7},
            "--decay-fraction 0.7: a decay over that much of 50 steps begins within the warm-up of 20",
        ),
        ({"schedule": "cosine-restarts", "restart_cycles": 46}, "--restart-cycles 46: more than the 45 steps"),
        ({"schedule": "wsd", "decay_fraction": 0.0}, "--decay-fraction must be"),
        ({"schedule": "wsd", "decay_fraction": 1.5}, "--decay-fraction must be"),
    ],
)
def test_contradictory_flags_are_refused(write, flags, told):
    with pytest.raises(ConfigError) as caught:
        checked(write, **flags)
    assert told in str(caught.value)
