# SPDX-License-Identifier: Apache-2.0
"""Levels between servers and the network: which of them a group spans, and the bandwidth that it has there."""

import dataclasses

import pytest
from conftest import CONFIGS

from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.time.device_model import DeviceModel
from sporeloom.planner.cluster import Cluster, Efficiency, Level, read_cluster
from sporeloom.planner.errors import NoInterval, time_interval
from sporeloom.planner.members import counterparts, every
from sporeloom.planner.rates import MESSAGE_S, all_to_all, group_bandwidth
from sporeloom.planner.search import PlanRequest, search

SERVER, RACK = 4, 16
INTRA, RACK_GB, INTER = 200 * 0.5, 60 * 0.5, 40 * 0.25
"""GB/s that collectives reach inside a server, between servers of a rack, and between racks."""
FLAT = Cluster(
    chip="h100",
    peak_tflops=100,
    memory_gb=80,
    memory_gb_per_s=1000,
    devices_per_node=SERVER,
    intra_node_gb_per_s=200,
    inter_node_gb_per_s=40,
    efficiency=Efficiency(matmul=0.5, attention=0.5, memory=0.5, intra_node=0.5, inter_node=0.25, layer_overhead_us=0),
)
RACKS = dataclasses.replace(FLAT, levels=[Level(devices=RACK, gb_per_s=60)])


def seconds_of(cluster, kind, num_bytes, ranks):
    return DeviceModel(cluster).collective(kind, num_bytes, list(ranks)).seconds


@pytest.mark.parametrize(
    ("size", "stride", "members", "bandwidth"),
    [
        (4, 1, [4, 4, 4], INTRA),
        (8, 1, [4, 8, 8], INTRA),  # four devices of a server bring 4 x 30 GB/s, more than its links
        (8, 2, [2, 8, 8], 2 * RACK_GB),
        (4, 4, [1, 4, 4], RACK_GB),  # one device of each server of a rack
        (8, 4, [1, 4, 8], RACK_GB),  # two racks: four devices of each bring 4 x 10 GB/s, the rack 30
        (32, 1, [4, 16, 32], INTRA),
        (2, 16, [1, 1, 2], INTER),  # one device of each rack
        (4, 8, [1, 2, 4], 2 * INTER),
    ],
)
def test_a_ring_has_the_slowest_of_the_links_that_it_crosses(size, stride, members, bandwidth):
    assert {each.counts for each in every(RACKS.units, size, stride, 0)} == {tuple(members)}
    assert group_bandwidth(RACKS, size, stride) == pytest.approx(bandwidth * 1e9)
    ranks = tuple(range(0, size * stride, stride))
    assert {each.counts for each in counterparts(RACKS.units, ranks, 0, 0)} == {tuple(members)}


def test_an_all_to_all_sends_each_part_over_the_smallest_level_that_connects_both():
    near, rack, far = 3 / INTRA, 12 / RACK_GB, 16 / INTER
    sent = (near + rack + far) / 32 + 31 * MESSAGE_S
    assert all_to_all(RACKS, 1e9, every(RACKS.units, 32, 1, 0)) == pytest.approx(sent)
    assert seconds_of(RACKS, "AlltoAll", 1e9, range(32)) == pytest.approx(sent)


def test_a_row_is_sent_to_a_device_and_to_another_server_once_whatever_the_level():
    copies, servers = 4, 8
    once, of_device = (places * (1 - (1 - 1 / places) ** copies) / copies for places in (servers, 32))
    sent = (of_device * 3 / INTRA + once * (12 / RACK_GB + 16 / INTER)) / 32 + 31 * MESSAGE_S
    assert all_to_all(RACKS, 1e9, every(RACKS.units, 32, 1, 0), copies=copies) == pytest.approx(sent)


def test_oversubscription_divides_what_a_level_carries():
    shared = dataclasses.replace(FLAT, levels=[Level(devices=RACK, gb_per_s=60, oversubscription=3)])
    assert group_bandwidth(shared, 4, 4) == pytest.approx(RACK_GB / 3 * 1e9)
    assert group_bandwidth(shared, 4, 1) == group_bandwidth(RACKS, 4, 1)
    assert group_bandwidth(shared, 2, 16) == group_bandwidth(RACKS, 2, 16)


def test_a_level_of_network_links_has_their_efficiency():
    leaf = dataclasses.replace(FLAT, levels=[Level(devices=RACK, gb_per_s=60, links="network")])
    assert group_bandwidth(leaf, 4, 4) == pytest.approx(60 * 0.25 * 1e9)


def test_latency_is_added_once_a_message_that_passes_the_level():
    slow = dataclasses.replace(FLAT, levels=[Level(devices=RACK, gb_per_s=60, latency_us=5)])

    def more(kind, ranks):
        return (seconds_of(slow, kind, 1e6, ranks) - seconds_of(RACKS, kind, 1e6, ranks)) * 1e6

    assert more("AllGather", range(4)) == pytest.approx(0)
    assert more("AllGather", range(16)) == pytest.approx(3 * 5)  # of a ring, three messages leave a server
    assert more("AllReduce", range(16)) == pytest.approx(2 * 2 * 5)  # of a tree, two up and two down
    assert more("Message", (0, 4)) == pytest.approx(5)
    assert more("Message", (0, 16)) == pytest.approx(0)  # over the network, whose latency is that of any message
    assert more("AlltoAll", range(16)) == pytest.approx(12 * 5)
    assert (
        all_to_all(slow, 1e6, every(slow.units, 16, 1, 0)) - all_to_all(RACKS, 1e6, every(RACKS.units, 16, 1, 0))
    ) * 1e6 == pytest.approx(12 * 5)


def test_an_all_to_all_of_a_level_has_its_bisection():
    torus = dataclasses.replace(FLAT, levels=[Level(devices=RACK, gb_per_s=60, all_to_all_gb_per_s=6)])
    assert group_bandwidth(torus, 4, 4) == group_bandwidth(RACKS, 4, 4)
    more = [all_to_all(c, 1e9, every(c.units, 4, 4, 0)) - 3 * MESSAGE_S for c in (torus, RACKS)]
    assert more[0] == pytest.approx(10 * more[1])


def test_levels_nest_and_a_group_crosses_each():
    both = dataclasses.replace(RACKS, levels=[*RACKS.levels, Level(devices=64, gb_per_s=20, links="network")])
    row = 20 * 0.25
    assert {each.counts for each in every(both.units, 128, 1, 0)} == {(4, 16, 64, 128)}
    assert group_bandwidth(both, 4, 16) == pytest.approx(row * 1e9)
    assert group_bandwidth(both, 8, 8) == pytest.approx(min(RACK_GB, 2 * row) * 1e9)


def test_a_level_as_slow_as_the_network_changes_nothing():
    same = dataclasses.replace(FLAT, levels=[Level(devices=RACK, gb_per_s=40, links="network")])
    for size in (2, 4, 8, 16):
        for stride in (1, 2, 4, 8, 16):
            assert group_bandwidth(same, size, stride) == pytest.approx(group_bandwidth(FLAT, size, stride))
            ranks = range(0, size * stride, stride)
            for kind in ("Message", "AllReduce", "AlltoAll"):
                assert seconds_of(same, kind, 1e8, ranks) == pytest.approx(seconds_of(FLAT, kind, 1e8, ranks))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("levels: [{devices: 12, gb_per_s: 60}]", "levels[0].devices 12 is not a larger multiple of the 8 devices"),
        ("levels: [{devices: 8, gb_per_s: 60}]", "levels[0].devices 8 is not a larger multiple of the 8 devices"),
        (
            "levels: [{devices: 64, gb_per_s: 60}, {devices: 32, gb_per_s: 20}]",
            "levels[1].devices 32 is not a larger multiple of the 64 devices",
        ),
        ("levels: [{devices: 64}]", "gb_per_s missing"),
        ("levels: [{devices: 64, gb_per_s: 60, oversubscription: 0.5}]", "oversubscription must be at least 1"),
        ("levels: [{devices: 64, gb_per_s: 60, latency: 1}]", "latency is unknown"),
        ("levels: [{devices: 64, gb_per_s: 0}]", "gb_per_s must be"),
        ("levels: [{devices: 64, gb_per_s: 60, all_to_all_gb_per_s: -1}]", "all_to_all_gb_per_s must be"),
        ("levels: [{devices: 64, gb_per_s: 60, port_gb_per_s: 50}]", "port_gb_per_s 50 is below the 60 GB/s"),
        ("inter_node_port_gb_per_s: 10", "inter_node_port_gb_per_s 10 is below the 50 GB/s"),
        ("inter_node_gb_per_s: 0", "inter_node_gb_per_s must be"),
        ("inter_node_gbps: 50", "inter_node_gbps is unknown"),
    ],
)
def test_a_wrong_level_is_refused_by_its_number(write, text, problem):
    with pytest.raises(ConfigError, match=r"c\.yaml") as refused:
        read_cluster(write("c.yaml", f"chip: h100\n{text}\n"))
    assert any(problem in found for found in refused.value.problems), refused.value.problems


def test_the_super_node_connects_two_dies_of_384_chips():
    cluster = read_cluster(CONFIGS / "clusters/cloudmatrix384.yaml")
    inside = cluster.intra_node_gb_per_s * cluster.fitted.intra_node * 1e9
    assert cluster.devices_per_node == 2 * 8
    assert cluster.levels[0].devices == 2 * 384
    assert group_bandwidth(cluster, 512, 1) == group_bandwidth(cluster, 48, 16) == inside
    assert group_bandwidth(cluster, 2, 768) < inside / 4


def test_a_rack_of_gb200_connects_72_devices_of_18_servers():
    cluster = read_cluster(CONFIGS / "clusters/gb200_nvl72.yaml")
    flat = Cluster.of_chip("gb200")
    assert {each.counts for each in every(cluster.units, 18, 4, 72)} == {(1, 18, 18)}
    assert {each.counts for each in every(cluster.units, 64, 4, 256)} == {(1, 10, 64)}  # 18, 18, 18 and the rest
    for size, stride in ((4, 1), (64, 1), (16, 4), (2, 64)):
        assert group_bandwidth(cluster, size, stride) == group_bandwidth(flat, size, stride)


def test_plans_use_the_level_and_have_no_interval_where_none_was_measured(dims):
    request = PlanRequest(
        dims=dims, cluster=read_cluster(CONFIGS / "clusters/cloudmatrix384.yaml"), devices=256, global_batch_size=256
    )
    best = search(request)[0]
    flat = search(dataclasses.replace(request, cluster=dataclasses.replace(request.cluster, levels=[])))[0]
    assert best.seconds < flat.seconds
    assert isinstance(time_interval(dims, best.job, request.cluster), NoInterval)


@pytest.fixture
def dims():
    from sporeloom.models.family import size_config  # noqa: PLC0415
    from sporeloom.planner.dimensions import of_decoder  # noqa: PLC0415

    return of_decoder(size_config("pangu", "13b"))
