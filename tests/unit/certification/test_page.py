# SPDX-License-Identifier: Apache-2.0
"""What a certificate says of the time of a step."""

import dataclasses

import pytest

from sporeloom.certification import page
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.errors import memory_errors, published_errors
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.report import as_dict
from sporeloom.planner.search import evaluate

DIMS = Dimensions(num_layers=8, hidden_size=1024, num_heads=16, vocab_size=50_000, seq_len=1024)


@pytest.mark.parametrize("chip", ["ascend910b", "ascend910a", "a100_80gb"])
def test_the_interval_is_the_chips_own(chip):
    cluster = Cluster.of_chip(chip)
    option = evaluate(DIMS, Parallelism(dp=8, zero=1), cluster)
    estimate, errors = as_dict(option, option, cluster), published_errors()["dense"][chip]
    low, high = errors["low"] * option.seconds, errors["high"] * option.seconds
    expected = f"{low:.3g} to {high:.3g} s for 80% of published runs on plain text"
    assert page.interval_text(estimate) == expected
    shown = page._time({"estimate": estimate})
    assert expected in shown and estimate["interval"]["meaning"] in shown
    of_memory, peak = memory_errors(), option.peak_bytes / 2**30
    memory = f"{peak:.1f} GB a device ({of_memory['low'] * peak:.1f} to {of_memory['high'] * peak:.1f} GB)"
    assert page.memory_text(estimate) == memory
    assert memory in shown and estimate["memory_interval"]["meaning"] in shown
    assert expected in page._summary({"verdict": "certified", "estimate": estimate})


def test_without_an_interval_none_is_made_up():
    cluster = Cluster.of_chip("ascend910b")
    option = evaluate(DIMS, dataclasses.replace(Parallelism(dp=8), precision="fp32"), cluster)
    estimate = as_dict(option, option, cluster)
    assert page.interval_text(estimate) == "no interval known"
    assert page.memory_text(estimate).endswith(" GB a device (no interval known)")
    assert "none of the published runs computes in float32" in page._time({"estimate": estimate})
    own = {"step_time_s": 1.0, "rows_per_s": 8.0, "chip": "ascend910b", "seconds": {"matmul": 1.0}}
    assert "No interval is known" in page._time({"estimate": own}).replace("interval \n", "interval ")
