# SPDX-License-Identifier: Apache-2.0
import pytest

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


def test_layouts_are_shown():
    assert describe_layout([["dp", "tp"], []], 1) == "[dp,tp, ~]"
    assert describe_layout([["tp"], []], 4) == "[tp, ~] /4"
