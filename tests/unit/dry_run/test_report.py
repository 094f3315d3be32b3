# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest

from mindloom.dry_run.html import schedule
from mindloom.dry_run.summary import describe_layout, translate_group
from mindloom.strategy.mesh import Mesh

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


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 8)])
def test_the_drawn_schedule_is_1f1b(num_stages, num_microbatches):
    stages = schedule(num_stages, num_microbatches)
    starts = {(kind, i, stage): start for stage, passes in enumerate(stages) for kind, i, start in passes}
    assert len(starts) == 2 * num_stages * num_microbatches
    lasts = {"forward": 1, "backward": 2}
    for (kind, i, stage), start in starts.items():
        before = ("forward", i, stage - 1) if kind == "forward" else ("backward", i, stage + 1)
        if before in starts:
            assert start >= starts[before] + lasts[kind]
    for passes in stages:  # one thing at a time
        times = sorted((start, start + lasts[kind]) for kind, _, start in passes)
        assert all(end <= start for (_, end), (start, _) in pairwise(times))
    end = max(start + lasts[kind] for (kind, _, _), start in starts.items())
    assert end == 3 * (num_microbatches + num_stages - 1)


def test_layouts_are_shown():
    assert describe_layout([["dp", "tp"], []], 1) == "[dp,tp, ~]"
    assert describe_layout([["tp"], []], 4) == "[tp, ~] /4"
