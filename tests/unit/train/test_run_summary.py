# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from sporeloom.train import run_summary
from sporeloom.train.run_summary import RunTimes, describe, peak_memory_bytes, write_summary


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(run_summary.time, "perf_counter", lambda: now[0])
    return now


def run_of(clock):
    times = RunTimes(began=clock[0])
    for activity, seconds in (("compile", 6.0), ("compute", 2.0), ("compute", 8.0), ("checkpoint", 3.0)):
        with times.measure(activity):
            clock[0] += seconds
    clock[0] += 1.0
    times.steps, times.tokens = 2, 5000
    return times.summary(3_000_000_000)


def test_every_second_belongs_to_an_activity_or_to_the_rest(clock):
    summary = run_of(clock)
    assert summary["time_s"] == {"compile": 6.0, "compute": 10.0, "checkpoint": 3.0, "other": 1.0}
    assert (summary["total_s"], summary["goodput"], summary["tokens_per_s"]) == (20.0, 0.5, 500.0)


def test_a_block_that_fails_counts(clock):
    times = RunTimes(began=clock[0])

    def fail():
        with times.measure("data"):
            clock[0] += 4.0
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert times.seconds == {"data": 4.0}


def test_the_line_says_shares_throughput_and_memory(clock):
    assert describe(run_of(clock)) == (
        "20.0 s: compile 30%, compute 50%, checkpoint 15%, other 5%; 500 tokens/s while computing, "
        "3.00 GB in the largest process"
    )


def test_the_file_has_the_values(clock, tmp_path):
    summary = run_of(clock)
    write_summary(tmp_path, summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_memory_is_that_of_this_process():
    before = peak_memory_bytes()
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])  # touch every page
    assert peak_memory_bytes() >= before
    assert peak_memory_bytes() > len(block)
