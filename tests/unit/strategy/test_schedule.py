# SPDX-License-Identifier: Apache-2.0
"""What follows from the order of passes, counted in the order itself. That ranks run it:
tests/parity/test_schedules.py."""

from itertools import pairwise

import pytest

from sporeloom.planner.parallelism import Parallelism
from sporeloom.strategy.config import V_SHAPED
from sporeloom.strategy.schedule import held_parts, idle_microbatches, microbatches_held, passes, split_passes, times

SIZES = [(1, 1), (1, 3), (2, 2), (2, 5), (3, 3), (3, 8), (4, 4), (4, 9), (4, 11), (4, 30), (8, 8), (8, 12), (8, 40)]
"""Stages and microbatches."""
KINDS = [(v, schedule) for v in (1, 2, 3, 4, 6) for schedule in ("1f1b", "gpipe", "seqpipe")] + [
    *((1, "zero_bubble_h1"), (2, "zero_bubble_v"), (2, "dualpipe_v"))
]
GRID = [
    (p, m, v, schedule) for p, m in SIZES for v, schedule in KINDS if schedule not in V_SHAPED or (m >= 2 * p and p > 1)
]
FEW = [(p, m, v, "1f1b") for p, m in ((4, 2), (4, 3), (8, 5)) for v in (1, 2, 3)]
"""Fewer microbatches than stages, which published runs have."""


def counted(stage, p, m, v, schedule):
    """The most parts of microbatches that are forwarded and not yet done with, and by part at each moment."""
    order, held, moments = passes(stage, p, m, v, schedule), [0] * v, []
    late = {(one.part, one.microbatch) for one in order if one.kind == "weights"}
    for one in order:
        if one.kind == "forward":
            held[one.part] += 1
        elif one.kind == "weights" or (one.part, one.microbatch) not in late:
            held[one.part] -= 1
        moments.append(tuple(held))
    assert not any(held)
    return max(map(sum, moments)), moments


def microbatches_in_flight(job, stage):
    return microbatches_held(stage, job.pp, job.num_microbatches, job.virtual_stages, job.schedule)


@pytest.mark.parametrize(("p", "m", "v", "schedule"), GRID + FEW)
def test_a_stage_holds_what_its_order_of_passes_says(p, m, v, schedule):
    job = Parallelism(pp=p, num_microbatches=m, virtual_stages=v, schedule=schedule)
    for stage in range(p):
        most, moments = counted(stage, p, m, v, schedule)
        assert microbatches_in_flight(job, stage) == most / v
        fullest = held_parts(stage, p, m, v, schedule)
        assert set(fullest) <= set(moments)
        for sizes in ([1] * v, range(v), range(v, 0, -1), [1, *[0] * (v - 1)], [*[0] * (v - 1), 1], [7, *range(v - 1)]):
            peaks = (
                max(sum(a * b for a, b in zip(m, sizes, strict=True)) for m in which) for which in (moments, fullest)
            )
            assert len(set(peaks)) == 1  # whatever the size of a part


@pytest.mark.parametrize(
    ("p", "m", "v", "schedule", "stage", "held"),
    [
        (4, 8, 1, "1f1b", 0, 4),  # as many as stages behind it, and itself
        (4, 8, 1, "1f1b", 3, 1),
        (4, 8, 2, "1f1b", 0, 5.5),  # arXiv:2205.05198 section 4.3: p (1 + (p - 1) / (p v))
        (8, 64, 3, "1f1b", 0, 8 + 7 / 3),
        (4, 8, 4, "1f1b", 1, 4.25),  # not 3.75: a stage later holds two parts less, not a whole microbatch
        (4, 8, 4, "1f1b", 3, 3.25),
        (4, 8, 2, "gpipe", 3, 8),
        (4, 8, 2, "zero_bubble_v", 0, 4),  # as many on every stage, the most that 1f1b's first one holds
        (4, 8, 2, "zero_bubble_v", 3, 4),
        (4, 8, 2, "dualpipe_v", 0, 4.5),  # arXiv:2412.19437, table 2: a part more than there are
        (4, 8, 2, "dualpipe_v", 3, 4.5),
        (4, 3, 1, "1f1b", 0, 3),
    ],
)
def test_microbatches_held_are_those_of_the_papers(p, m, v, schedule, stage, held):
    job = Parallelism(pp=p, num_microbatches=m, virtual_stages=v, schedule=schedule)
    assert microbatches_in_flight(job, stage) == pytest.approx(held)


@pytest.mark.parametrize(("p", "m", "v", "schedule"), GRID + FEW)
def test_the_bubble_is_that_of_the_order(p, m, v, schedule):
    drawn = times(p, m, v, schedule)
    idle = max(stage[-1][2] for stage in drawn) / (3 * v) - m
    assert idle_microbatches(p, m, v, schedule) == pytest.approx(idle, abs=1e-9)
    if schedule == "zero_bubble_v":  # arXiv:2401.10241: gradients of weights fill all but (p - 1) of a forward pass
        assert idle == pytest.approx((p - 1) / 3)
    if schedule == "dualpipe_v":
        # arXiv:2412.19437, table 2, with 2p parts: (p - 1) (forward with backward + backward - 3 weights), where a pair
        # passes both results on at its end; here each as soon as it is there. A microbatch's parts take 6.
        assert 0 <= idle <= (p - 1) * (3 + 2 - 3) / 6


@pytest.mark.parametrize(("p", "m", "v", "schedule"), GRID)
def test_a_schedule_does_one_thing_at_a_time_and_each_after_what_it_needs(p, m, v, schedule):
    stages = times(p, m, v, schedule)
    spans = {}
    for stage, drawn in enumerate(stages):
        split = {(one.part, one.microbatch) for one in split_passes([one for one, _, _ in drawn])}
        for one, start, end in drawn:
            is_v = schedule in V_SHAPED and one.part == 1
            place = 2 * p - 1 - stage if is_v else one.part * p + stage
            spans[one.kind, one.microbatch, place] = start, end
            halved = one.kind == "backward" and (one.part, one.microbatch) in split
            assert end - start == (2 if one.kind == "backward" and not halved else 1)
        assert all(end <= start for (_, _, end), (_, start, _) in pairwise(drawn))
    for kind in ("forward", "backward"):
        assert sum(name == kind for name, _, _ in spans) == p * v * m
    for (kind, i, place), (start, _) in spans.items():
        before = {"forward": ("forward", i, place - 1), "backward": ("backward", i, place + 1)}.get(kind)
        if kind == "weights" or (kind == "backward" and place == p * v - 1):
            before = ("backward" if kind == "weights" else "forward", i, place)
        if before in spans:
            assert start >= spans[before][1]


@pytest.mark.parametrize("schedule", ["1f1b", "seqpipe", "zero_bubble_v", "dualpipe_v"])
def test_passes_of_other_lengths_are_taken_as_they_are(schedule):
    lasts = {"forward": 2.0, "backward": 5.0, "weights": 1.5}
    drawn = times(4, 8, 2, schedule, lambda stage, one: lasts[one.kind] * (1 + (stage == 0)))
    for stage, row in enumerate(drawn):
        assert sum(end - start for _, start, end in row) == pytest.approx(16 * 7 * (1 + (stage == 0)))
