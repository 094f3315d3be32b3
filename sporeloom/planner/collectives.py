# SPDX-License-Identifier: Apache-2.0
"""Seconds of collectives, each by the algorithm that the chip's library would take for its size and group.

Both libraries estimate every algorithm they have by its messages and bytes, and take the fastest. Sources: NCCL,
`src/graph/tuning.cc` (ring, and for all-reduces a double binary tree over servers with a chain in each; PAT, of logarithmic
depth, where a group has one device a server, since NCCL 2.23); HCCL, `SelectAlgoTypeForAllReduce` and its siblings in
`coll_alg_operator.cc` (within servers, then between them by NHR or a ring; "pipeline" uses the links inside and between at
once) and its user guide. A message takes MESSAGE_S, over NVLink NVLINK_S, and the latency of its level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sporeloom.planner.cluster import Cluster
from sporeloom.planner.members import Members, counterparts
from sporeloom.planner.rates import MESSAGE_S, Reached, levels_bandwidth, reached, ring_bandwidth, sent_to_all

HALVES = ("AllGather", "ReduceScatter")
"""Collectives that are half of an all-reduce."""
NVLINK_S = 0.6e-6
"""Seconds of a short message over NVLink, by NCCL's own estimate."""
TREE_SPEED = 0.9
"""Share of the links' speed that NCCL's tree reaches, by its own estimate."""


class Choice(NamedTuple):
    """A collective's algorithm and its seconds."""

    algorithm: str
    seconds: float


def collective(
    cluster: Cluster, kind: str, num_bytes: float, ranks: Sequence[int], stage_size: int = 0, devices: int = 0
) -> Choice:
    """The algorithm of the slowest of the groups that send at once, and its seconds.

    Args:
        kind: AllReduce, AllGather, ReduceScatter, AlltoAll, or Message between two ranks.
        num_bytes: of the unsharded tensor.
        ranks: that take part, in ascending order.
        stage_size: ranks of a pipeline stage, which wait for the slowest of their groups; 0: for the one given.
        devices: of the job, whose other stages send meanwhile, too.
    """
    if len(ranks) == 1:
        return Choice("", 0.0)
    measured = (line for rates in cluster.measured[:1] for line in rates.collectives)
    if line := next((line for line in measured if (line.kind, line.ranks) == (kind, len(ranks))), None):
        return Choice("measured", line.seconds(num_bytes))
    groups = counterparts(cluster.units, tuple(ranks), stage_size, devices)
    return max((fastest(cluster, kind, num_bytes, members) for members in groups), key=lambda choice: choice.seconds)


def fastest(cluster: Cluster, kind: str, num_bytes: float, members: Members) -> Choice:
    """The fastest algorithm of the chip's library for a group whose members lie so, and its seconds."""
    found = (
        Choice(name, ALGORITHMS[name](cluster, kind, num_bytes, members)) for name in names(cluster, kind, members)
    )
    return min(found, key=lambda choice: choice.seconds)


def names(cluster: Cluster, kind: str, members: Members) -> Iterator[str]:
    """Algorithms that the chip's library has for a group; of equally fast ones it takes the first."""
    if kind in ("Message", "AlltoAll"):
        yield "direct"
        return
    yield "ring"
    is_flat = set(members.counts) == {1, members.size}
    if cluster.goes_by_levels or (kind in HALVES and is_flat):
        yield "hierarchical"
    if kind == "AllReduce":
        yield "direct" if cluster.goes_by_levels else "tree"


def _hops(cluster: Cluster, members: Members) -> Iterator[tuple[Reached, float]]:
    """The links of each level, and seconds of a short message over them."""
    for number, level in enumerate(reached(cluster, members)):
        is_nvlink = number == 0 and not cluster.goes_by_levels
        yield level, (NVLINK_S if is_nvlink else MESSAGE_S) + level.latency_s


def _latency(cluster: Cluster, members: Members, messages: Callable[[int, int], float]) -> float:
    """Seconds of messages one after another. `messages`: their number at a level, by the members in a unit below and in the
    level."""
    return sum(messages(level.below, level.within) * hop for level, hop in _hops(cluster, members))


def ring(cluster: Cluster, kind: str, num_bytes: float, members: Members) -> float:
    """Seconds of a ring: n - 1 messages of an n-th each, most of them inside servers."""
    size = members.size
    half = _latency(cluster, members, lambda below, within: size / below - size / within)
    half += (size - 1) / size * num_bytes / ring_bandwidth(cluster, members)
    return half if kind in HALVES else 2 * half


def hierarchical(cluster: Cluster, kind: str, num_bytes: float, members: Members) -> float:
    """Seconds of one level after the other, each in log2 rounds: a device gathers, or adds up, from as many units as its
    level has, and its share of the tensor is that of its unit."""
    half = _latency(cluster, members, lambda below, within: math.ceil(math.log2(within / below)))
    half += (members.size - 1) / members.size * num_bytes / levels_bandwidth(cluster, members)
    return half if kind in HALVES else 2 * half


def tree(cluster: Cluster, kind: str, num_bytes: float, members: Members) -> float:
    """Seconds of an all-reduce up and down two binary trees over servers, each of half of the tensor in small pieces, and a
    chain inside each server."""

    def depth(below: int, within: int) -> float:
        return within - 1 if below == 1 and within == members.counts[0] else math.ceil(math.log2(within / below))

    up = _latency(cluster, members, depth)
    return 2 * (up + num_bytes / (TREE_SPEED * ring_bandwidth(cluster, members)))


def direct(cluster: Cluster, kind: str, num_bytes: float, members: Members) -> float:
    """Seconds of messages from each device to each other: of the tensor for an all-reduce, of parts for an all-to-all."""
    if kind == "AlltoAll":
        return sent_to_all(cluster, members, num_bytes) + (members.size - 1) * MESSAGE_S
    if kind == "Message":
        crossed = sum((level.within - level.below) * level.latency_s for level in reached(cluster, members))
        return MESSAGE_S + crossed + num_bytes / ring_bandwidth(cluster, members)
    hops = _hops(cluster, members)
    return sum((level.within - level.below) * (hop + num_bytes / level.bytes_per_s) for level, hop in hops)


ALGORITHMS: Mapping[str, Callable[[Cluster, str, float, Members], float]] = {
    "ring": ring,
    "hierarchical": hierarchical,
    "tree": tree,
    "direct": direct,
}
