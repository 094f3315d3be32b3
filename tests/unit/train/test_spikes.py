# SPDX-License-Identifier: Apache-2.0
"""Steps that are left out, what a spike is, and how far a run goes back."""

import math

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.train.spikes import MAX_REWINDS, SpikeGuard, parse_steps


def test_steps_are_read():
    assert parse_steps(["61-80", "7", "9-9"]) == (range(61, 81), range(7, 8), range(9, 10))
    assert parse_steps([]) == ()
    with pytest.raises(ConfigError) as told:
        parse_steps(["5-3", "a-4", "0", "-3", "4-"])
    assert [problem.partition(":")[0] for problem in told.value.problems] == [
        f"--skip-steps {text}" for text in ("5-3", "a-4", "0", "-3", "4-")
    ]


def test_a_spike_is_far_above_the_median_of_the_last_losses_or_no_number():
    guard = SpikeGuard(1.5, window=6)
    assert not guard.is_spike(100.0)  # nothing to compare it with
    assert guard.is_spike(math.nan)
    assert guard.is_spike(math.inf)
    for loss in (5.0, 5.0, 9.0, 4.0, 4.0, 4.0):
        assert not guard.is_spike(loss)
    assert not guard.is_spike(6.0)  # the median is 4.5
    assert guard.is_spike(7.0)
    assert guard.is_spike(7.0)  # a spike is no measure for the next


def test_spikes_close_together_lead_further_back(tmp_path):
    def steps(found):
        return [int(path.name.removeprefix("step-")) for path in found]

    guard = SpikeGuard(2.0, window=10)
    with pytest.raises(ConfigError, match="holds no checkpoint to go back to"):
        guard.to_drop(3, tmp_path)
    for step in (10, 20, 30):
        (tmp_path / f"step-{step:08}").mkdir()
    assert steps(guard.to_drop(35, tmp_path)) == []
    assert steps(guard.to_drop(42, tmp_path)) == [30]
    assert steps(guard.to_drop(70, tmp_path)) == []  # long after
    for number in range(MAX_REWINDS - len(guard.spikes)):
        guard.to_drop(1000 * (number + 1), tmp_path)
    with pytest.raises(ConfigError, match="lower --learning-rate"):
        guard.to_drop(9000, tmp_path)
