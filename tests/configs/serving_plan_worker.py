# SPDX-License-Identifier: Apache-2.0
"""Plans of servers, for test_plan_serve."""

import dataclasses
from pathlib import Path

from sporeloom.models.family import size_config
from sporeloom.planner.cluster import read_cluster
from sporeloom.planner.errors import NoInterval
from sporeloom.serve import plan as planning
from sporeloom.serve.plan import ServingLoad, plan_serving
from sporeloom.serve.plan_command import as_dict


def plan(size, tp, load, seq_len=None, **changes):
    """A plan for ascend910b as data; `seq_len`: the model's longest context, where it is not that of its size."""
    changes |= {"seq_len": seq_len} if seq_len else {}
    model = dataclasses.replace(size_config("pangu", size), compute_dtype="bfloat16", dropout_rate=0.0, **changes)
    return as_dict(
        plan_serving("pangu", model, read_cluster(Path("ascend910b")), ServingLoad(**load), tp), NoInterval("a test")
    )


def by_depth_and_of_all(size, tp, load, num_layers):
    """A plan from few layers, and that of all of them."""
    found, reduced_depths = [plan(size, tp, load, num_layers=num_layers)], planning.reduced_depths
    planning.reduced_depths = lambda model: [model]
    try:
        return [*found, plan(size, tp, load, num_layers=num_layers)]
    finally:
        planning.reduced_depths = reduced_depths
