# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured times of steps, with reports of a dry run that the test writes."""

import json

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.train.prediction import MeasuredSteps, Prediction, read_prediction

JOB = {"mesh": "pp 1 x dp 2 x tp 1 = 2", "batch_size": 8, "seq_len": 32}
PREDICTION = Prediction("ascend910b", 2.0, (1.5, 3.0), "at least 80% of 60 runs", None)


@pytest.fixture
def report(tmp_path):
    """Write a report, changed as the test says."""

    def write(job=JOB, stages=1, pools=((0, 100),), **time):
        ranks = [{"stage": stage, "memory": {"pool_bytes": pool}} for stage, pool in pools]
        found = {
            "chip": "ascend910b",
            "seconds": 2.0,
            "step_time_interval_s": [1.5, 3.0],
            "interval": {"meaning": "so"},
        }
        values = {"job": {**job, "stages": [{}] * stages}, "ranks": ranks, "time": {**found, **time}}
        path = tmp_path / "report.json"
        path.write_text(json.dumps(values))
        return path

    return write


def test_the_time_its_interval_and_the_memory_are_read(report):
    assert read_prediction(report(), JOB) == Prediction("ascend910b", 2.0, (1.5, 3.0), "so", 100)
    assert read_prediction(report(step_time_interval_s=None), JOB).interval_s is None


def test_memory_is_that_of_the_fullest_stage_and_unknown_if_one_is_missing(report):
    assert read_prediction(report(stages=2, pools=((0, 100), (1, 90))), JOB).memory_bytes == 100
    assert read_prediction(report(stages=2), JOB).memory_bytes is None


def test_the_report_of_another_job_is_refused_with_all_differences(report):
    with pytest.raises(ConfigError) as error:
        read_prediction(report({**JOB, "batch_size": 4, "seq_len": 64}), JOB)
    assert [problem.partition(": ")[2] for problem in error.value.problems] == [
        "a dry run with batch_size 4; that of this run is 8",
        "a dry run with seq_len 64; that of this run is 32",
    ]


@pytest.mark.parametrize("text", ["{}", "[]", '{"job": {}, "ranks": [], "time": {"seconds": "x"}}'])
def test_what_is_not_a_report_is_refused(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"sporeloom dry-run --time"):
        read_prediction(path, JOB)


def test_a_time_that_is_not_positive_is_refused(report):
    with pytest.raises(ConfigError, match="must be positive"):
        read_prediction(report(seconds=0.0), JOB)


def notes_of(measured, times):
    return [note for seconds in times if (note := measured.add(seconds))]


def test_steps_outside_of_the_interval_are_noted_once():
    measured = MeasuredSteps(PREDICTION)
    assert notes_of(measured, [9.0, 9.0, *[4.0] * 9]) == [
        "a step takes 4 s, 2.00 times the 2 s predicted on ascend910b, outside of 1.5 to 3 s: at least 80% of 60 runs"
    ]


def test_steps_inside_of_the_interval_and_slow_first_ones_are_not_noted():
    measured = MeasuredSteps(PREDICTION)
    assert notes_of(measured, [9.0, 9.0, *[2.5] * 9]) == []
    assert measured.summary() == {"predicted_step_time_s": 2.0, "step_time_s": 2.5}
    assert measured.last_words() == (
        "a step takes 2.5 s, 1.25 times the 2 s predicted on ascend910b; the interval is 1.5 to 3 s"
    )


def test_without_an_interval_the_end_of_the_run_says_why():
    measured = MeasuredSteps(Prediction("cpu", 2.0, None, "no interval is known: so", 5))
    assert notes_of(measured, [9.0] * 12) == []
    assert measured.last_words().endswith("no interval is known: so")
    assert measured.summary()["predicted_memory_bytes"] == 5
