# SPDX-License-Identifier: Apache-2.0
"""The order of the mesh axes decides which ranks are neighbours: closed forms count it, and searches try other orders."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from sporeloom.models.family import size_config
from sporeloom.planner.cluster import read_cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.layer_time import layer_forward
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.rates import Rates, groups_along
from sporeloom.planner.search import PlanRequest, describe, evaluate, search
from sporeloom.strategy.axes import AXES
from sporeloom.strategy.mesh import Mesh

H100 = read_cluster(Path("h100"))
TP_OUTSIDE = Mesh(order=("tp", "dp"), tp=2, dp=8).order
SHORT = dataclasses.replace(of_decoder(size_config("pangu", "2.6b")), seq_len=64)
"""A few tokens a step: sums of gradients are far larger than those over tp."""


def seconds(order, dims=SHORT):
    return evaluate(dims, Parallelism(dp=8, tp=2, order=order, own_graphs=True), H100).time


def test_the_closed_form_counts_where_the_groups_of_an_order_lie():
    usual, other = seconds(AXES), seconds(TP_OUTSIDE)
    assert other.gradients < usual.gradients / 2 and other.tensor_parallel > 2 * usual.tensor_parallel
    assert other.total < usual.total
    long = dataclasses.replace(SHORT, seq_len=4096)
    assert seconds(AXES, long).total < seconds(TP_OUTSIDE, long).total


def test_keys_and_values_take_the_links_between_ranks_of_cp():
    """16 neighbours, 8 servers with 2 neighbours each, and one rank of each of 16 servers."""
    dims = dataclasses.replace(SHORT, seq_len=4096)
    jobs = [
        Parallelism(cp=16, own_graphs=True),
        Parallelism(cp=16, tp=4, order=("pp", "dp", "cp", "tp"), own_graphs=True),
        Parallelism(cp=16, tp=8, own_graphs=True),
    ]
    rates = [Rates(dims, job, H100) for job in jobs]
    inside, network = (link.gb_per_s * link.efficiency * 1e9 for link in (H100.links[0], H100.links[-1]))
    assert [each.cp for each in rates] == pytest.approx([min(inside, 8 * network), 2 * network, network])
    assert Rates(dims, dataclasses.replace(jobs[2], order=("pp", "dp", "tp", "cp")), H100).cp == rates[0].cp
    moved = 2 * 2 * 4096 / 16 * dims.kv_size * 15 / rates[0].cp
    assert layer_forward(dims, jobs[0], rates[0]).tensor_parallel == pytest.approx(moved)


ORDERS = [AXES, ("pp", "tp", "cp", "dp"), ("pp", "cp", "dp", "tp"), ("pp", "tp", "dp", "cp")]


PLACED = [(order, ep) for order in ORDERS for ep in (1, 2, 3, 12) if (order, ep) != (AXES, 12)]
"""With 12 experts' ranks over a part of tp as well: in the usual order these are counted as if at equal distances."""


@pytest.mark.parametrize(("order", "ep"), PLACED)
@pytest.mark.parametrize("axes", [("tp",), ("dp", "cp"), ("ep",)])
def test_groups_of_an_order_are_those_of_its_ranks(order, ep, axes):
    job = Parallelism(pp=2, dp=6, cp=3, tp=4, ep=ep, order=order)
    groups = [job.mesh.group(rank, *axes) for rank in range(144)]
    stride = groups[0][1] - groups[0][0] if len(groups[0]) > 1 else 1
    found = groups_along(H100, job, axes, len(groups[0]), stride)
    assert {each.counts for each in found} == {
        (min(Counter(rank // 8 for rank in group).values()), len(group)) for group in groups
    }


def test_a_search_finds_the_planted_order():
    request = PlanRequest(dims=SHORT, cluster=H100, devices=16, global_batch_size=8)
    options = search(request)
    found = next(option for option in options if option.job.order == TP_OUTSIDE and option.job.dp == 8)
    usual = [option for option in options if option.job.order == AXES and (option.job.dp, option.job.tp) == (8, 2)]
    assert found.seconds < min(option.seconds for option in usual)
    assert "axes in the order tp, dp" in describe(found.job) and found.job.mesh.order == TP_OUTSIDE
