# SPDX-License-Identifier: Apache-2.0
"""Which schedule goes with which pipeline and engine."""

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.strategy.loader import strategy_of


def strategy(schedule, virtual_stages=1, **more):
    pipeline = {"num_microbatches": 8, "schedule": schedule, "virtual_stages": virtual_stages}
    return strategy_of({"mesh": {"pp": 2}, "rules": "decoder", "pipeline": pipeline, **more})


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "why"),
    [
        ("seqpipe", 1, "take 1f1b, gpipe or zero_bubble_h1"),
        ("zero_bubble_v", 1, "take 1f1b, gpipe or zero_bubble_h1"),
        ("zero_bubble_h1", 2, "has no virtual stages"),
        ("zero_bubble_v", 3, "zero_bubble_v has 2"),
    ],
)
def test_a_schedule_that_has_other_virtual_stages_is_refused(schedule, virtual_stages, why):
    with pytest.raises(ConfigError, match=why):
        strategy(schedule, virtual_stages)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_h1"])
def test_what_mindspores_pipelines_do_not_have_is_refused_where_they_are_used(schedule):
    ours = strategy(schedule)
    assert ours.is_spmd
    with pytest.raises(ConfigError, match=rf"pipeline.schedule: MindSpore's own pipelines.* have no {schedule}"):
        ours.by_mindspore()
    with pytest.raises(ConfigError, match=f"have no {schedule}"):
        strategy(schedule, engine="mindspore")
    assert ours.device_problems() == ours.graph_problems() == []


def test_gpipe_with_virtual_stages_is_mindspores_too():
    assert strategy("gpipe", 2).device_problems() == []
    assert strategy("gpipe", 2).by_mindspore().engine == "mindspore"
