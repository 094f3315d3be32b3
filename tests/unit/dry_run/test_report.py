# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest

from sporeloom.dry_run.schedule import LASTS, times
from sporeloom.dry_run.summary import describe_layout, translate_group
from sporeloom.strategy.mesh import Mesh

MESH = Mesh(pp=2, dp=4, tp=2)


@pytest.mark.parametrize(
    ("members", "of_rank", "to_rank", "expected"),
    [
        ([0, 1], 0, 5, [4, 5]),  # tensor parallel
        ([0, 2, 4, 6], 0, 5, [1, 3, 5, 7]),  # data parallel
        ([0, 8], 0, 5, [5, 13]),  # stages
        ([0, 2], 0, 5, [5, 7]),  # blocks of two replicas
        ([0, 4], 0, 3, [3, 7]),  # the same place of each block
        ([0, 4], 0, 6, [2, 6]),
        (list(range(8)), 0, 5, list(range(8))),  # a whole stage
        ([8, 9], 8, 13, [12, 13]),
        (list(range(16)), 3, 11, list(range(16))),
    ],
)
def test_groups_of_another_rank_of_the_stage(members, of_rank, to_rank, expected):
    assert translate_group(MESH, members, of_rank, to_rank) == expected


@pytest.mark.parametrize(
    ("members", "expected"), [([0, 1, 2, 3], [12, 13, 14, 15]), ([0, 4, 8, 12, 16, 20], [1, 5, 9, 13, 17, 21])]
)
def test_groups_that_go_across_the_axes(members, expected):
    """Of a parameter that all 24 ranks hold, sharded over 4 of them."""
    assert translate_group(Mesh(dp=8, tp=3), members, 0, 13) == expected


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 8)])
@pytest.mark.parametrize(("virtual_stages", "schedule"), [(1, "1f1b"), (2, "1f1b"), (3, "seqpipe"), (2, "gpipe")])
def test_a_drawn_schedule_does_one_thing_at_a_time_and_each_after_what_it_needs(
    num_stages, num_microbatches, virtual_stages, schedule
):
    stages = times(num_stages, num_microbatches, virtual_stages, schedule)
    starts = {
        (one.kind, one.microbatch, one.part * num_stages + stage): start
        for stage, drawn in enumerate(stages)
        for one, start in drawn
    }
    assert len(starts) == 2 * num_stages * virtual_stages * num_microbatches
    for (kind, i, part), start in starts.items():
        before = ("forward", i, part - 1) if kind == "forward" else ("backward", i, part + 1)
        before = before if before in starts or kind == "forward" else ("forward", i, part)
        if before in starts:
            assert start >= starts[before] + LASTS[before[0]]
    for drawn in stages:
        spans = sorted((start, start + LASTS[one.kind]) for one, start in drawn)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    if schedule != "gpipe" and num_microbatches % num_stages == 0:
        end = max(start + LASTS[kind] for (kind, _, _), start in starts.items())
        assert end == 3 * (
            virtual_stages * num_microbatches + num_stages - 1
        )  # the bubble: a part of the stages but one


def test_layouts_are_shown():
    assert describe_layout([["dp", "tp"], []], 1) == "[dp,tp, ~]"
    assert describe_layout([["tp"], []], 4) == "[tp, ~] /4"
