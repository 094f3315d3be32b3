# SPDX-License-Identifier: Apache-2.0
import json
from types import SimpleNamespace

import pytest

from sporeloom.train import run_summary
from sporeloom.train.run_summary import PeakMemory, RunTimes, describe, write_summary
from sporeloom.train.utilization import StepFlops, Utilization

MIB = 1 << 20
OF_STEP = StepFlops(1e12, 1.5e12)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(run_summary.time, "perf_counter", lambda: now[0])
    return now


def utilization(peak=None, num_devices=1):
    found = object.__new__(Utilization)
    found.peak, found.num_devices = peak, num_devices
    return found


def run_of(clock, flops=OF_STEP, **use):
    times = RunTimes(began=clock[0])
    for activity, seconds in (("compile", 6.0), ("compute", 2.0), ("compute", 8.0), ("checkpoint", 3.0)):
        with times.measure(activity):
            clock[0] += seconds
    clock[0] += 1.0
    times.add_step(2000, flops)
    times.add_step(3000, flops)
    return {**times.summary(utilization(**use)), "starts": 1, "goodput": 0.5, "peak_memory_bytes": 3_000_000_000}


def test_every_second_belongs_to_an_activity_or_to_the_rest(clock):
    summary = run_of(clock)
    assert summary["time_s"] == {"compile": 6.0, "compute": 10.0, "checkpoint": 3.0, "other": 1.0}
    assert (summary["total_s"], summary["tokens_per_s"], summary["steps"]) == (20.0, 500.0, 2)


def test_flops_of_all_steps_are_divided_by_the_time_of_computing(clock):
    summary = run_of(clock, peak=1e12, num_devices=4)
    assert summary["tokens_per_s_per_device"] == 125.0
    assert (summary["flops_per_s_per_device"], summary["mfu"], summary["hfu"]) == (2e11, 0.2, 0.3)


def test_one_step_that_is_not_counted_leaves_no_flops(clock):
    assert not {"flops_per_s_per_device", "mfu", "hfu"} & set(run_of(clock, flops=None, peak=1e12))


def test_a_block_that_fails_counts(clock):
    times = RunTimes(began=clock[0])

    def fail():
        with times.measure("data"):
            clock[0] += 4.0
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert times.seconds == {"data": 4.0}


def test_a_step_is_divided_into_computation_communication_and_data(clock):
    times, communicated = RunTimes(began=clock[0]), [5.0]
    for data, computing, communicating in ((9.0, 9.0, 9.0), (0.5, 2.0, 1.0)):
        earlier = dict(times.seconds)
        with times.measure("data"):
            clock[0] += data
        with times.measure_step(lambda: communicated[0]):
            clock[0] += computing + communicating
            communicated[0] += communicating
    assert times.since(earlier) == {"compute_s": 2.0, "communication_s": 1.0, "data_s": 0.5}


def test_unknown_communication_is_left_out(clock):
    times = RunTimes(began=clock[0])
    with times.measure_step(lambda: None):
        clock[0] += 3.0
    assert times.since({}) == {"compute_s": 3.0}


def test_the_line_says_shares_throughput_and_memory(clock):
    assert describe(run_of(clock)) == (
        "20.0 s: compile 30%, compute 50%, checkpoint 15%, other 5%; 500 tokens/s while computing, "
        "200 GFLOP/s of each device; goodput 50%, 3.00 GB in the largest process"
    )
    summary = {**run_of(clock, peak=1e12, num_devices=4), "starts": 3, "peak_device_memory_bytes": 40_000_000_000}
    assert describe(summary).partition("; ")[2] == (
        "500 tokens/s while computing, 125 of each device, 200 GFLOP/s of each device, MFU 20.0%, HFU 30.0%; "
        "goodput 50% over 3 starts, 40.00 GB on the fullest device, 3.00 GB in the largest process"
    )


def test_the_file_has_the_values(clock, tmp_path):
    summary = run_of(clock)
    write_summary(tmp_path, summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_memory_is_that_of_this_process():
    before = PeakMemory.of_process()
    block = bytearray(64 * MIB)
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])  # touch every page
    after = PeakMemory.of_process()
    assert after.host >= before.host and after.host > 64
    assert after.device == 0  # of a CPU


def test_memory_of_all_ranks_is_the_largest_and_the_sum():
    others = PeakMemory(300, 0)
    engine = SimpleNamespace(max_over_ranks=lambda v: max(v, others.host if v else 0), sum_over_ranks=lambda v: v + 300)
    assert PeakMemory(100, 0).over_ranks(engine) == {"peak_memory_bytes": 300 * MIB, "total_memory_bytes": 400 * MIB}
