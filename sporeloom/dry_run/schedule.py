# SPDX-License-Identifier: Apache-2.0
"""The order in which the stages of a pipeline work on microbatches, as MindSpore's schedulers chain it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sporeloom.strategy.config import Schedule


class Pass(NamedTuple):
    """A microbatch in a part of the model."""

    kind: Literal["forward", "backward"]
    part: int
    """Of those its stage holds."""
    microbatch: int


LASTS = {"forward": 1, "backward": 2}
"""In a drawing."""


def passes(
    stage: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1, schedule: Schedule = "1f1b"
) -> list[Pass]:
    """What a stage does, in order. Virtual stages take microbatches in groups of as many as there are stages, those left over
    with the first group; after some forward passes a forward and a backward one follow each other."""
    first = num_stages + num_microbatches % num_stages
    groups = [list(range(first))] + [
        list(range(start, start + num_stages)) for start in range(first, num_microbatches, num_stages)
    ]
    if schedule == "gpipe" or num_microbatches < num_stages:
        groups = [list(range(num_microbatches))]
    parts = range(virtual_stages)
    forward = [Pass("forward", part, i) for group in groups for part in parts for i in group]
    backward = [Pass("backward", part, i) for group in groups for part in reversed(parts) for i in group]
    if schedule == "gpipe":
        return forward + backward
    behind = num_stages - stage - 1
    ahead = behind + 1 if virtual_stages == 1 else 2 * behind + (virtual_stages - 1) * len(groups[0]) + 1
    order = forward[:ahead]
    for i, one in enumerate(backward):
        order += [one, *forward[ahead + i : ahead + i + 1]]
    return order


def times(
    num_stages: int, num_microbatches: int, virtual_stages: int = 1, schedule: Schedule = "1f1b"
) -> list[list[tuple[Pass, int]]]:
    """Each stage's passes and when they start, if a forward one takes 1, a backward one 2, and sending nothing."""
    ends: dict[Pass, int] = {}  # parts counted over all stages here
    last, clock = num_stages * virtual_stages - 1, [0] * num_stages
    todo = [passes(stage, num_stages, num_microbatches, virtual_stages, schedule) for stage in range(num_stages)]
    result: list[list[tuple[Pass, int]]] = [[] for _ in todo]
    while any(todo):
        for stage, order in enumerate(todo):
            while order:
                one = order[0]
                mine = one._replace(part=one.part * num_stages + stage)
                needed = mine._replace(part=mine.part + (-1 if one.kind == "forward" else 1))
                if mine == Pass("backward", last, one.microbatch):
                    needed = mine._replace(kind="forward")
                is_first = one.kind == "forward" and mine.part == 0
                if not is_first and needed not in ends:
                    break
                start = max(clock[stage], ends.get(needed, 0))
                clock[stage] = ends[mine] = start + LASTS[one.kind]
                result[stage].append((one, start))
                order.pop(0)
    return result
