# SPDX-License-Identifier: Apache-2.0
"""Algorithms of collectives: each closed form against a simulation of all its messages, and which one is chosen."""

import dataclasses
import heapq
import math
from collections import defaultdict

import pytest
from conftest import CONFIGS

from sporeloom.planner.cluster import Cluster, Efficiency, Level, read_cluster
from sporeloom.planner.collectives import ALGORITHMS, NVLINK_S, TREE_SPEED, collective, fastest
from sporeloom.planner.members import counterparts
from sporeloom.planner.rates import MESSAGE_S, group_bandwidth

SERVER, RACK = 4, 16
RATES = {"server": 100e9, "rack": 6e9, "network": 1e9}
"""Bytes/s that a device reaches."""
CLUSTER = Cluster(
    chip="h100",
    peak_tflops=100,
    memory_gb=80,
    memory_gb_per_s=1000,
    devices_per_node=SERVER,
    intra_node_gb_per_s=200,
    inter_node_gb_per_s=4,
    levels=[Level(devices=RACK, gb_per_s=12, latency_us=3)],
    efficiency=Efficiency(matmul=0.5, attention=0.5, memory=0.5, intra_node=0.5, inter_node=0.25, layer_overhead_us=0),
)


def level_of(one, other):
    return "server" if one // SERVER == other // SERVER else "rack" if one // RACK == other // RACK else "network"


class Messages:
    """Messages with what they wait for. A port of each device and level sends one after another.

    `holds`: a port is busy while a message starts; else the next one follows its bytes.
    """

    def __init__(self, holds=True, uplinks=None):
        self.sent, self.holds, self.uplinks = [], holds, uplinks or {}

    def send(self, source, target, num_bytes, after=()):
        self.sent.append((source, target, num_bytes, tuple(after)))
        return len(self.sent) - 1

    def seconds(self):
        waits, users = [len(after) for *_, after in self.sent], defaultdict(list)
        for number, (*_, after) in enumerate(self.sent):
            for needed in after:
                users[needed].append(number)
        ready, free, end = [(0.0, number) for number, count in enumerate(waits) if not count], defaultdict(float), 0.0
        heapq.heapify(ready)
        arrived = defaultdict(float)
        while ready:
            time, number = heapq.heappop(ready)
            source, target, num_bytes, _ = self.sent[number]
            level = level_of(source, target)
            shared = self.uplinks.get(level)  # devices that share a port, and its bytes/s
            port = (level, source // shared[0] if shared else source)
            start, moving = max(time, free[port]), num_bytes / (shared[1] if shared else RATES[level])
            latency = {"server": NVLINK_S, "rack": MESSAGE_S + 3e-6, "network": MESSAGE_S}[level]
            free[port] = start + moving + latency * self.holds
            arrival = start + moving + latency
            end = max(end, arrival)
            for user in users[number]:
                arrived[user] = max(arrived[user], arrival)
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, (arrived[user], user))
        assert not any(waits)
        return end


def ring(messages, ranks, num_bytes, after=None):
    """A reduce-scatter or all-gather: each rank passes an n-th on as soon as it has it."""
    last = [None] * len(ranks)
    for _ in range(len(ranks) - 1):
        new = []
        for place, rank in enumerate(ranks):
            needed = last[place - 1]
            target = ranks[(place + 1) % len(ranks)]
            new.append(messages.send(rank, target, num_bytes / len(ranks), () if needed is None else (needed,)))
        last = new


def gathered_by_levels(messages, ranks, num_bytes):
    """An all-gather: in racks' counterparts first, then servers', then inside, in Bruck's rounds."""
    received, held = {rank: [] for rank in ranks}, num_bytes / len(ranks)
    for unit, below in ((math.inf, RACK), (RACK, SERVER), (SERVER, 1)):
        groups = defaultdict(list)
        for rank in ranks:
            place = rank % below if unit < math.inf else rank % RACK
            groups[(rank // unit if unit < math.inf else 0), place].append(rank)
        size = max(map(len, groups.values()))
        for step in range(math.ceil(math.log2(size)) if size > 1 else 0):
            blocks, new = min(2**step, size - 2**step), []
            for group in groups.values():
                for place, rank in enumerate(group):
                    target = group[place - 2**step]
                    new.append((target, messages.send(rank, target, blocks * held, received[rank])))
            received = {rank: [] for rank in ranks}
            for target, number in new:
                received[target].append(number)
        held *= size


def to_all(messages, ranks, num_bytes):
    for place, rank in enumerate(ranks):
        for further in range(1, len(ranks)):
            messages.send(rank, ranks[(place + further) % len(ranks)], num_bytes)


def parents(size):
    """A binary tree whose odd ranks are leaves: rank -> its parent."""
    found = {}

    def under(parent, low, high):
        if low < high:
            middle = (low + high) // 2
            found[middle] = parent
            under(middle, low, middle)
            under(middle, middle + 1, high)

    under(0, 1, size)
    return found


def two_trees(messages, ranks, num_bytes, pieces):
    """An all-reduce: half of it up and down a tree, the other half in the mirrored one."""
    for names in (ranks, ranks[::-1]):
        up_of = parents(len(ranks))
        below = {place: [child for child, parent in up_of.items() if parent == place] for place in range(len(ranks))}

        def send(one, other, after, names=names):
            return messages.send(names[one], names[other], num_bytes / 2 / pieces, after)

        for _ in range(pieces):
            up, down = {}, {}

            def climb(place, up=up, below=below, up_of=up_of, send=send):
                after = [climb(child) for child in below[place]]
                if place:
                    up[place] = send(place, up_of[place], after)
                return up.get(place)

            def descend(place, up=up, down=down, below=below, send=send):
                after = [down[place]] if place else [up[child] for child in below[place]]
                for child in below[place]:
                    down[child] = send(place, child, after)
                    descend(child)

            climb(0)
            descend(0)


def closed(name, kind, num_bytes, ranks, cluster=CLUSTER):
    (members,) = counterparts(cluster.units, tuple(ranks), 0, 0)
    return ALGORITHMS[name](cluster, kind, num_bytes, members)


ALONE = (range(0, 4), range(0, 16, 4), range(0, 128, 16), range(0, 48, 16), range(0, 12, 4), range(0, 2))
"""Groups whose members are all in one unit below, or each in another."""


@pytest.mark.parametrize("ranks", ALONE)
@pytest.mark.parametrize("num_bytes", [1e3, 1e6, 1e9])
def test_a_ring_takes_as_long_as_its_messages(ranks, num_bytes):
    messages = Messages()
    ring(messages, list(ranks), num_bytes)
    assert closed("ring", "AllGather", num_bytes, ranks) == pytest.approx(messages.seconds())
    assert closed("ring", "AllReduce", num_bytes, ranks) == pytest.approx(2 * messages.seconds())


@pytest.mark.parametrize("ranks", [*ALONE, range(16), range(0, 16, 2), range(64), range(0, 128, 2), range(0, 96, 4)])
@pytest.mark.parametrize("num_bytes", [1e3, 1e6, 1e9])
def test_a_hierarchical_collective_takes_as_long_as_its_messages(ranks, num_bytes):
    messages = Messages()
    gathered_by_levels(messages, list(ranks), num_bytes)
    assert closed("hierarchical", "AllGather", num_bytes, ranks) == pytest.approx(messages.seconds())


@pytest.mark.parametrize("ranks", ALONE)
@pytest.mark.parametrize("num_bytes", [1e3, 1e6])
def test_a_direct_sum_takes_as_long_as_its_messages(ranks, num_bytes):
    messages = Messages()
    to_all(messages, list(ranks), num_bytes)
    assert closed("direct", "AllReduce", num_bytes, ranks) == pytest.approx(messages.seconds())


@pytest.mark.parametrize("ranks", [range(0, 128, 16), range(0, 256, 16)])
def test_two_trees_take_as_long_as_their_messages(ranks):
    short, long = 1e-3, 1e9
    for num_bytes, pieces in ((short, 1), (long, 256)):
        messages = Messages(holds=False)
        two_trees(messages, list(ranks), num_bytes, pieces)
        assert closed("tree", "AllReduce", TREE_SPEED * num_bytes, ranks) == pytest.approx(messages.seconds(), rel=0.1)
    sent = defaultdict(float)
    for source, _, num_bytes, _ in messages.sent:
        sent[source] += num_bytes
    assert max(sent.values()) == pytest.approx(2 * long)  # what the closed form moves


def test_rings_that_leave_a_server_share_its_devices_links():
    """Four rings of a quarter each, which leave every server by different devices."""
    servers, num_bytes, messages = 4, 1e9, Messages(holds=False)
    for first in range(SERVER):
        inside = [(first + place) % SERVER for place in range(1, SERVER + 1)]  # `first` is the last one
        ring(messages, [SERVER * server + device for server in range(servers) for device in inside], num_bytes / SERVER)
    assert closed("ring", "AllGather", num_bytes, range(16)) == pytest.approx(messages.seconds(), rel=0.03)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_groups_share_what_leaves_a_server(count):
    """`count` devices of each server, each in a ring of its own: one has its port, more share what leaves the server."""
    level = Level(devices=RACK, gb_per_s=12, oversubscription=2, port_gb_per_s=20, latency_us=3)
    cluster = dataclasses.replace(CLUSTER, levels=[level])
    messages = Messages(
        holds=False, uplinks={"rack": (1, 10e9)} if count == 1 else {"rack": (SERVER, 4 * 12e9 * 0.5 / 2)}
    )
    for device in range(count):
        ring(messages, list(range(device, RACK, SERVER)), 1e9)
    ranks = [rank for rank in range(RACK) if rank % SERVER < count]
    groups = [ranks[device::count] for device in range(count)]
    (members,) = _together(cluster, groups)
    assert ALGORITHMS["ring"](cluster, "AllGather", 1e9, members) == pytest.approx(messages.seconds(), rel=2e-3)


def _together(cluster, groups):
    import numpy as np  # noqa: PLC0415

    from sporeloom.planner.members import members_of  # noqa: PLC0415

    return members_of(cluster.units, np.array(groups))


def test_other_stages_of_a_unit_send_at_the_same_time():
    shared = dataclasses.replace(CLUSTER, levels=[Level(devices=RACK, gb_per_s=12, oversubscription=4)])
    alone, both = (collective(shared, "Message", 1e9, (0, 8), 2, devices).seconds for devices in (2, 16))
    assert both == pytest.approx(2 * alone, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "kind", "num_bytes", "ranks", "algorithm"),
    [
        ("h100", "AllReduce", 1e3, range(8), "ring"),
        ("h100", "AllReduce", 1e6, range(512), "tree"),
        ("h100", "AllReduce", 1e10, range(512), "ring"),
        ("h100", "AllGather", 1e3, range(512), "ring"),
        ("h100", "AllGather", 1e3, range(0, 512, 8), "hierarchical"),  # PAT: one device a server
        ("h100", "AlltoAll", 1e6, range(64), "direct"),
        ("ascend910b", "AllReduce", 1e3, range(4), "direct"),
        ("ascend910b", "AllReduce", 1e8, range(4), "hierarchical"),
        ("ascend910b", "AllReduce", 1e5, range(512), "hierarchical"),
        ("ascend910b", "AllReduce", 1e10, range(512), "ring"),
        ("ascend910b", "AllReduce", 1e5, range(16), "hierarchical"),
        ("ascend910b", "ReduceScatter", 1e5, range(0, 512, 8), "hierarchical"),
        ("ascend910b", "Message", 1e6, (0, 8), "direct"),
    ],
)
def test_the_algorithm_is_chosen_by_size_and_group(name, kind, num_bytes, ranks, algorithm):
    assert collective(read_cluster(CONFIGS / f"clusters/{name}.yaml"), kind, num_bytes, ranks).algorithm == algorithm


@pytest.mark.parametrize("name", ["ascend910b", "h100", "cloudmatrix384", "gb200_nvl72", "tpu_v4"])
def test_plans_have_the_speed_of_the_largest_messages(name):
    cluster = read_cluster(CONFIGS / f"clusters/{name}.yaml")
    for size, stride in ((8, 1), (32, 1), (16, 8), (512, 1), (64, 4)):
        (members,) = counterparts(cluster.units, tuple(range(0, size * stride, stride)), size * stride, size * stride)
        for kind, times in (("AllGather", 1), ("AllReduce", 2)):
            found = [fastest(cluster, kind, num_bytes, members).seconds for num_bytes in (1e13, 2e13)]
            bandwidth = group_bandwidth(cluster, size, stride, size * stride, as_library=True)
            moved = times * (size - 1) / size * 1e13 / bandwidth
            assert found[1] - found[0] == pytest.approx(moved)
