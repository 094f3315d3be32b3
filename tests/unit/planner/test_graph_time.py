# SPDX-License-Identifier: Apache-2.0
"""Time of a graph by its counts, against the formulas written out."""

import pytest

from sporeloom.planner.cluster import Cluster, Efficiency
from sporeloom.planner.collectives import NVLINK_S
from sporeloom.planner.graph_time import graph_time
from sporeloom.planner.rates import MESSAGE_S

SHARES = {"matmul": 0.5, "attention": 0.5, "memory": 0.5, "intra_node": 0.5, "inter_node": 0.25}
CLUSTER = Cluster(
    chip="h100",
    peak_tflops=100,
    memory_gb=80,
    memory_gb_per_s=1000,
    devices_per_node=4,
    intra_node_gb_per_s=200,
    inter_node_gb_per_s=40,
    efficiency=Efficiency(**SHARES, layer_overhead_us=0),
)


def time(collectives=(), **changes):
    return graph_time(1e12, 1e9, collectives, CLUSTER, **{"in_float32": False, **changes})


def test_products_and_passes_take_what_the_chip_reaches():
    assert time().matmul == pytest.approx(1e12 / 50e12)
    assert time(in_float32=True).matmul == pytest.approx(2e12 / 50e12)
    assert time().memory == pytest.approx(2e9 / 500e9)


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds", "started"),
    [
        ("AllReduce", [0, 1, 2, 3], 2 * 3 / 4 * 1e9 / 100e9, 6 * NVLINK_S),
        ("AllGather", [0, 1, 2, 3], 3 / 4 * 1e9 / 100e9, 3 * NVLINK_S),
        ("Send", [0, 4], 1e9 / 10e9, MESSAGE_S),
        ("Send", [0, 1], 1e9 / 100e9, MESSAGE_S),
        ("AllReduce", [0, 4], 2 * 1 / 2 * 1e9 / 10e9, 2 * MESSAGE_S),  # one a node: its own link
        (
            "AllReduce",
            list(range(8)),
            2 * 7 / 8 * 1e9 / 40e9,
            2 * (6 * NVLINK_S + MESSAGE_S),
        ),  # four a node bring four links
    ],
)
def test_collectives_go_round_a_ring_or_once_over(kind, ranks, seconds, started):
    assert time([(3, kind, 1e9, ranks)]).communication == pytest.approx(3 * (seconds + started))


def test_an_all_to_all_sends_to_other_nodes_over_the_devices_own_link():
    near, far = 3 / 100e9, 4 / 10e9
    sent = (near + far) / 8 * 1e9 + 7 * MESSAGE_S
    assert time([(1, "AlltoAll", 1e9, range(8))]).communication == pytest.approx(sent)


def test_a_rank_waits_for_the_slowest_group_of_its_stage():
    ranks = [0, 1, 2]  # in one node, where 3, 4 and 5 are in two
    assert time([(1, "AllGather", 1e9, ranks)]).communication == pytest.approx(2 / 3 * 1e9 / 100e9 + 2 * NVLINK_S)
    assert time([(1, "AllGather", 1e9, ranks)], stage_size=12).communication == pytest.approx(
        2 / 3 * 1e9 / 10e9 + 2 * MESSAGE_S
    )


def test_a_pipeline_waits_for_its_stages():
    whole = time(idle=3 / 8)
    assert whole.bubble == pytest.approx(3 / 8 * (whole.matmul + whole.memory))
    assert whole.total == pytest.approx(sum(vars(whole).values()))
