# SPDX-License-Identifier: Apache-2.0
"""The order in which the stages of a pipeline work on microbatches, as MindSpore's schedulers chain it, and what follows
from it: the microbatches that a stage holds, and how long it is idle.

`tests/parity/test_schedules.py` compares it with the passes that ranks run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Literal

from sporeloom.strategy.config import V_SHAPED, Order
from sporeloom.strategy.listed_schedule import ListedSchedule, Pass, needed

Seconds = Callable[[int, Pass], float]
"""Seconds that a pass of a stage takes, if its backward pass is not split."""
DRAWN: dict[str, int] = {"forward": 1, "backward": 2}
"""Relative duration of a pass in a drawing."""
SPLIT = ("zero_bubble_h1", *V_SHAPED)
"""Built-in schedules that split backward passes."""
WHOLE_GROUPS = 3
"""Number of interleaved microbatches after which a stage holds no more than before."""


def passes(
    stage: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1, schedule: Order = "1f1b"
) -> list[Pass]:
    """The passes of a stage, in order. Virtual stages take microbatches in groups of about as many as there are
    stages; after some forward passes a forward and a backward one follow each other."""
    if isinstance(schedule, ListedSchedule):
        return list(schedule.orders[stage])
    if schedule == "dualpipe_v":
        return _dualpipe_v(stage, num_stages, num_microbatches)
    if schedule == "zero_bubble_v":
        return _zero_bubble_v(stage, num_stages, num_microbatches)
    if schedule == "zero_bubble_h1":
        return _zero_bubble_h1(stage, num_stages, num_microbatches)
    groups, parts = _groups(num_stages, num_microbatches, schedule), range(virtual_stages)
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


def _groups(num_stages: int, num_microbatches: int, schedule: Order) -> list[range]:
    """Sizes of the groups of microbatches that pass through a part together. Those left over go to the first
    group; with seqpipe to the first ones, one each."""
    if schedule == "gpipe" or num_microbatches < num_stages:
        return [range(num_microbatches)]
    count, left = divmod(num_microbatches, num_stages)
    sizes = [num_stages + (left if number == 0 else 0) for number in range(count)]
    if schedule == "seqpipe":
        each, more = divmod(left, count)
        sizes = [num_stages + each + (number < more) for number in range(count)]
    ends = [0, *itertools.accumulate(sizes)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _zero_bubble_h1(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """1f1b, but the gradients of weights wait: on stage s for s further backward passes, so that no stage holds
    more than the first one (arXiv:2401.10241, section 2.3)."""
    ahead = min(num_stages - stage, num_microbatches)
    order = [Pass("forward", 0, i) for i in range(ahead)]
    for i in range(num_microbatches):
        order.append(Pass("backward", 0, i))
        order += [Pass("weights", 0, i - stage)] if i >= stage else []
        order += [Pass("forward", 0, ahead + i)] if ahead + i < num_microbatches else []
    return order + [Pass("weights", 0, i) for i in range(max(0, num_microbatches - stage), num_microbatches)]


def _zero_bubble_v(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """Both parts of a stage in turn. The first backward passes of part 1 and the last ones of both parts leave the gradients
    of weights for later; stage 0, which sends nothing back from part 0, computes the last ones at the very end."""
    behind, last = num_stages - stage - 1, num_microbatches - 1
    late = [{last - i for i in range(num_stages - (stage + 1) // 2)}, {last - i for i in range((stage + 1) // 2)}]
    counts = dict.fromkeys(itertools.product(("forward", "backward", "weights"), (0, 1)), 0)
    order: list[Pass] = []

    def do(times: int, *steps: tuple[Literal["forward", "backward"], int]) -> None:
        for _, (kind, part) in itertools.product(range(times), steps):
            order.append(Pass(kind, part, counts[kind, part]))
            counts[kind, part] += 1

    do(2 * behind, ("forward", 0))
    do(stage + 1, ("forward", 0), ("forward", 1))
    for _ in range(behind):
        do(1, ("backward", 1))
        order.append(order[-1]._replace(kind="weights"))
        do(1, ("forward", 1))
    do(num_microbatches - num_stages - behind, ("backward", 1), ("forward", 0), ("backward", 0), ("forward", 1))
    do(behind, ("backward", 1), ("backward", 0), ("forward", 1))
    do(stage + 1, ("backward", 1), ("backward", 0))
    left = [Pass("weights", part, i) for part in (0, 1) for i in sorted(late[part])]
    for _ in range(behind):
        if stage > 0 and left and left[0].part == 0:
            order.append(left.pop(0))
        do(1, ("backward", 0))
    return order + left


def _dualpipe_v(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """DualPipe (arXiv:2412.19437, section 3.2.1) cut in half: in the middle a forward pass of one part and a backward pass of
    the other follow each other, so that one can compute while the other communicates; in the second half of the last
    backward passes the gradients of weights wait for the time that would be idle."""
    behind, order, waiting = num_stages - stage - 1, list[Pass](), list[Pass]()
    counts = dict.fromkeys(itertools.product(("forward", "backward"), (0, 1)), 0)

    def do(kind: Literal["forward", "backward"], part: int, splits: bool = False) -> None:
        order.append(Pass(kind, part, counts[kind, part]))
        counts[kind, part] += 1
        if splits:
            waiting.append(order[-1]._replace(kind="weights"))

    for _ in range(2 * behind):
        do("forward", 0)
    for _ in range(stage + 1):
        do("forward", 0)
        do("forward", 1)
    for _ in range(behind):
        do("backward", 1, splits=True)
        order.append(waiting.pop())
        do("forward", 1)
    for _ in range(num_microbatches - num_stages - behind):
        do("forward", 0)
        do("backward", 1)
        do("forward", 1)
        do("backward", 0)
    for _ in range(behind):
        do("backward", 1)
        do("forward", 1)
        do("backward", 0)
    for number in range(2 * (stage + 1)):
        do("backward", (number + 1) % 2, splits=number > stage)
    for _ in range(behind):
        order.append(waiting.pop(0))
        do("backward", 0, splits=True)
    return order + waiting


def splits_backward(schedule: Order) -> bool:
    """Whether gradients of weights are computed in passes of their own."""
    return schedule.splits_backward if isinstance(schedule, ListedSchedule) else schedule in SPLIT


def split_passes(order: list[Pass]) -> set[Pass]:
    """The backward passes of a stage's order that leave the gradients of weights for later."""
    return {one._replace(kind="backward") for one in order if one.kind == "weights"}


def times(
    num_stages: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    schedule: Order = "1f1b",
    seconds: Seconds | None = None,
) -> list[list[tuple[Pass, float, float]]]:
    """Each stage's passes, when they start and when they end, if sending takes nothing. Of a backward pass that leaves the
    gradients of weights for later `seconds` is asked of these and subtracted.

    Without `seconds` a forward pass takes 1, a backward one 2, and gradients of weights half of it.
    """
    lasts = seconds or (lambda stage, one: DRAWN.get(one.kind, 1))
    orders = [passes(stage, num_stages, num_microbatches, virtual_stages, schedule) for stage in range(num_stages)]
    ends: dict[Pass, float] = {}  # parts counted over all stages here
    last, clock = num_stages * virtual_stages - 1, [0.0] * num_stages
    result: list[list[tuple[Pass, float, float]]] = [[] for _ in orders]
    split = [split_passes(order) for order in orders]
    todo = [iter(order) for order in orders]
    waiting = [next(order, None) for order in todo]
    while any(waiting):
        before = sum(map(len, result))
        for stage in range(num_stages):
            while one := waiting[stage]:
                place = part_of_model(one.part, stage, num_stages, schedule)
                first = needed(one._replace(part=place), last)
                if first and first not in ends:
                    break
                duration = lasts(stage, one)
                if one in split[stage]:
                    duration -= lasts(stage, one._replace(kind="weights"))
                start = max(clock[stage], ends[first] if first else 0.0)
                clock[stage] = ends[one._replace(part=place)] = start + duration
                result[stage].append((one, start, clock[stage]))
                waiting[stage] = next(todo[stage], None)
        assert sum(map(len, result)) > before, "stages wait for each other"
    return result


def part_of_model(part: int, stage: int, num_stages: int, schedule: Order) -> int:
    """Number of the model part that is `part` of a stage."""
    if isinstance(schedule, ListedSchedule):
        return schedule.parts[stage][part]
    if schedule in V_SHAPED and part == 1:
        return 2 * num_stages - 1 - stage
    return part * num_stages + stage


@functools.cache
def held_parts(
    stage: int, num_stages: int, num_microbatches: int, virtual_stages: int, schedule: Order
) -> tuple[tuple[int, ...], ...]:
    """Numbers of microbatches that a stage holds in each of its parts, from the forward pass until all of the backward
    pass is done, at the moments when it may hold most, whatever the size of a part: at no other it has more of every
    part, and those on the way from one such moment to the next in equal steps are left out."""
    if schedule == "gpipe":
        return ((num_microbatches,) * virtual_stages,)
    if virtual_stages == 1 and not isinstance(schedule, ListedSchedule):
        return ((min(num_microbatches, num_stages - (0 if schedule == "zero_bubble_h1" else stage)),),)
    if schedule == "1f1b":  # the rest repeats
        num_microbatches = min(num_microbatches, num_microbatches % num_stages + WHOLE_GROUPS * num_stages)
    order = passes(stage, num_stages, num_microbatches, virtual_stages, schedule)
    moments = set(_moments(order, virtual_stages))
    fullest = sorted(m for m in moments if not any(_exceeds(other, m) for other in moments))
    steps = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(fullest)]
    turns = [m for m, before, after in zip(fullest[1:], steps, steps[1:], strict=False) if before != after]
    return tuple(dict.fromkeys([fullest[0], *turns, fullest[-1]]))


def _moments(order: list[Pass], virtual_stages: int) -> Iterator[tuple[int, ...]]:
    """Numbers of microbatches held after each forward pass that a backward one follows."""
    counts, split = [0] * virtual_stages, split_passes(order)
    for one, following in itertools.pairwise(order):
        if one.kind == "forward":
            counts[one.part] += 1
            if following.kind != "forward":
                yield tuple(counts)
        elif one not in split:
            counts[one.part] -= 1


def _exceeds(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def microbatches_held(
    stage: int, num_stages: int, num_microbatches: int, virtual_stages: int, schedule: Order
) -> float:
    """Microbatches in flight on a stage at its peak; one that it holds in one of v parts counts as 1/v."""
    moments = held_parts(stage, num_stages, num_microbatches, virtual_stages, schedule)
    return max(map(sum, moments)) / virtual_stages


@functools.cache
def idle_microbatches(num_stages: int, num_microbatches: int, virtual_stages: int, schedule: Order) -> float:
    """Idle time of a stage in a step (pipeline bubble), in microbatches, if all parts take equally long.

    Filling and draining takes p - 1 of a part. Fewer microbatches than stages also wait before each further part. Zero-bubble
    schedules and those from files are counted pass by pass, a forward pass taking as long as either half of a backward one.
    """
    if isinstance(schedule, ListedSchedule) or schedule in SPLIT:
        drawn = times(num_stages, num_microbatches, virtual_stages, schedule)
        return max(stage[-1][2] for stage in drawn) / (3 * virtual_stages) - num_microbatches
    short = max(0, num_stages - num_microbatches) * (virtual_stages - 1)
    return (num_stages - 1 + short) / virtual_stages
