# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages in the settings of other frameworks: layers of each, and virtual ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import get_args

from sporeloom.dialects.settings import InputKeys, LossNotes, Settings
from sporeloom.strategy.config import Pipeline, Schedule, Stages, Strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.stages import layers_per_part


def stage_layers(settings: Settings, lost: LossNotes) -> list[int] | None:
    """Number of layers of each stage, or virtual stage, where a strategy gives it."""
    stages = settings.strategy.pipeline.stages
    if not isinstance(stages, Stages):
        return None
    if stages.num_layers is not None:
        return list(stages.num_layers)
    if settings.num_layers is None:
        lost("pipeline.stages", "weights need the number of layers; give --num-layers")
        return None
    counts = layers_per_part(settings.num_layers, settings.strategy)
    lost("pipeline.stages.weights", f"written as the layers they give, {counts}", "approximated")
    return counts


def rows_of_parts(values: list[int], strategy: Strategy) -> list[list[int]]:
    """Values of each virtual stage, in the order of the layers: a row of all stages for each in turn."""
    pp = strategy.mesh.pp
    return [values[start : start + pp] for start in range(0, len(values), pp)]


def virtual_stages(
    book: InputKeys, pipeline: Pipeline, mesh: Mesh, count: str, switch: str | None, schedule: str
) -> Pipeline:
    """`pipeline` with the virtual stages of a MindFormers file. `count`, `switch`, `schedule`: its keys for their
    number, whether there are any, and their order."""
    number, order = book.peek(count, 1), book.peek(schedule, "1f1b")
    is_off = mesh.pp == 1 or number == 1 or (switch is not None and not book.peek(switch))
    if is_off:
        for key in (count, schedule, *([switch] if switch else [])):
            book.note(key, "no effect" if number != 1 or order != "1f1b" else "same", "no virtual stages")
        return pipeline
    for key in (count, *([switch] if switch else [])):
        book.note(key, "renamed", f"pipeline.virtual_stages {number}")
    if order not in get_args(Schedule):
        known = ", ".join(get_args(Schedule))
        book.note(schedule, "not expressible", f"{order!r}: the engine runs {known}; 1f1b is taken")
        order = "1f1b"
    else:
        book.note(schedule, "renamed", f"pipeline.schedule {order}")
    return dataclasses.replace(pipeline, virtual_stages=number, schedule=order)


def written_schedule(strategy: Strategy, lost: LossNotes) -> str:
    """MindFormers' name of the schedule."""
    if strategy.mindspore_problems():
        lost("pipeline.schedule", f"{strategy.pipeline.schedule}: MindFormers does not have it; 1f1b is its own")
        return "1f1b"
    return strategy.pipeline.schedule


def as_ranges(numbers: Sequence[int]) -> list[str]:
    """Format [1, 2, 3, 7] as 1-3 and 7."""
    runs: list[list[int]] = []
    for layer in sorted(numbers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
