# SPDX-License-Identifier: Apache-2.0
"""The time of a user-defined network's step waits as the strategy's schedule does."""

import pytest

from sporeloom.certification.full_size import custom_estimate
from sporeloom.planner.cluster import Cluster
from sporeloom.strategy.config import Pipeline, Strategy
from sporeloom.strategy.mesh import Mesh

RANK = {"flops": {"forward": 1e12}, "passed_bytes": 1e9, "collectives": [], "groups": {}, "in_float32": False}


@pytest.mark.parametrize(
    ("pipeline", "idle"),
    [
        (Pipeline(num_microbatches=8), 3 / 8),
        (Pipeline(num_microbatches=8, virtual_stages=2), 3 / 8 / 2),
        (Pipeline(num_microbatches=9, virtual_stages=3), 3 / 9 / 3),
        (Pipeline(num_microbatches=8, virtual_stages=2, schedule="gpipe"), 3 / 8 / 2),
        (Pipeline(num_microbatches=8, virtual_stages=2, schedule="zero_bubble_v"), 3 / 8 / 3),
    ],
)
def test_the_bubble_is_the_schedules_own(pipeline, idle):
    rank = {**RANK, "num_microbatches": pipeline.num_microbatches}
    strategy = Strategy(mesh=Mesh(pp=4), pipeline=pipeline)
    seconds = custom_estimate([rank], strategy, 72, Cluster.of_chip("ascend910b"))["seconds"]
    assert seconds["bubble"] == pytest.approx(idle * (seconds["matmul"] + seconds["memory"]))


def test_without_a_pipeline_nothing_waits():
    rank = {**RANK, "num_microbatches": 1}
    assert (
        custom_estimate([rank], Strategy(mesh=Mesh(dp=4)), 8, Cluster.of_chip("ascend910b"))["seconds"]["bubble"] == 0
    )


def test_a_batch_that_is_not_divided_goes_from_stage_to_stage():
    strategy = Strategy(mesh=Mesh(pp=4), pipeline=Pipeline(num_microbatches=8))
    rank = {**RANK, "num_microbatches": 1}
    seconds = custom_estimate([rank], strategy, 72, Cluster.of_chip("ascend910b"))["seconds"]
    assert seconds["bubble"] == pytest.approx(3 * (seconds["matmul"] + seconds["memory"]))
