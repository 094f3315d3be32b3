# SPDX-License-Identifier: Apache-2.0
"""Rates that a device and its links reach: seconds of products, and of collectives by the bytes they move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.members import Members, along, every
from sporeloom.planner.parallelism import Parallelism
from sporeloom.strategy.axes import AXES

FLOAT32_SPEED = 0.5  # of matrix products, relative to bf16: no published run in the fit computes so
KERNEL_HEAD = 128  # fused attention kernels take as long for narrower heads
MESSAGE_S = 2e-6  # to send one of an all-to-all's messages off, however short: published latencies of small messages
RING_HOP_S, NETWORK_HOP_S = 3.4e-6, 14e-6  # of a ring: NCCL's own constants for long messages, in a server and between


def ring_bandwidth(cluster: Cluster, members: Members) -> float:
    """Bytes/s at which a ring moves data, for one device.

    Rings that leave a server share its links: of a group with k members in a server each member brings one device's link.
    The same holds for each level; one that connects no further members is not used.
    """
    levels = [level for level in reached(cluster, members) if level.below < level.within]
    return min((level.below * level.bytes_per_s for level in levels), default=cluster.links[0].rate(1) * 1e9)


def slowest_ring(cluster: Cluster, groups: Iterable[Members]) -> float:
    """Bytes/s at which the slowest of some rings moves data, for one device."""
    return min(ring_bandwidth(cluster, members) for members in groups)


def levels_bandwidth(cluster: Cluster, members: Members) -> float:
    """The same where one level after the other gathers, or adds up: across servers each device moves what the others of its
    server do not."""
    if members.size == 1:
        return ring_bandwidth(cluster, members)
    levels = reached(cluster, members)
    seconds = sum((1 / level.below - 1 / level.within) / level.bytes_per_s for level in levels)
    return (members.size - 1) / members.size / seconds


def group_bandwidth(cluster: Cluster, size: int, stride: int, devices: int = 0, *, as_library: bool = False) -> float:
    """Bytes/s at which a ring through every `stride`-th device moves data, for one device: the slowest such ring in a job of
    so many devices. `as_library`: what the chip's library reaches, which may go level by level."""
    return _slowest(cluster, every(cluster.units, size, stride, devices), as_library)


def axes_bandwidth(cluster: Cluster, job: Parallelism, axes: tuple[str, ...], size: int, stride: int) -> float:
    """The same of the groups of a job along some mesh axes, which are every `stride`-th of `size` ranks in the usual
    order."""
    return _slowest(cluster, groups_along(cluster, job, axes, size, stride), job.own_graphs)


def groups_along(
    cluster: Cluster, job: Parallelism, axes: tuple[str, ...], size: int, stride: int
) -> frozenset[Members]:
    """Members of the groups of a job along some mesh axes, see `axes_bandwidth`."""
    if job.order == AXES:
        return every(cluster.units, size, stride, job.devices)
    mesh = job.mesh
    if "ep" in axes and mesh.ep > mesh.dp:
        axes = mesh.expert_parts[1]
    return along(cluster.units, mesh, axes)


def _slowest(cluster: Cluster, groups: Iterable[Members], as_library: bool) -> float:
    if not (as_library and cluster.goes_by_levels):
        return slowest_ring(cluster, groups)
    return min(max(ring_bandwidth(cluster, each), levels_bandwidth(cluster, each)) for each in groups)


class Reached(NamedTuple):
    """Part of one level's links that a group uses."""

    below: int
    """Members in a unit below."""
    within: int
    """Members that the level connects."""
    bytes_per_s: float
    """Bandwidth of one device."""
    all_to_all_bytes_per_s: float
    latency_s: float


def reached(cluster: Cluster, members: Members) -> Iterator[Reached]:
    """The links of each level, in order."""
    of_levels = zip(cluster.links, (1, *members.counts), members.counts, members.senders, strict=False)
    for link, below, within, senders in of_levels:
        all_to_all = link.all_to_all_rate(senders) * cluster.share_of_all_to_all(link)
        yield Reached(below, within, link.rate(senders) * 1e9, all_to_all * 1e9, link.latency_s)


def float32_speed(cluster: Cluster) -> float:
    """Speed of matrix products in float32, relative to bf16."""
    measured = cluster.fitted.float32
    return FLOAT32_SPEED if measured is None else measured


def ring_latency(groups: Iterable[Members]) -> float:
    """Seconds that the hops of a ring take, however little each moves: one from each rank to the next. The slowest of the
    groups. An all-reduce has twice as many."""
    return max(_hops(members.size, math.ceil(members.size / members.counts[0])) for members in groups)


def _hops(size: int, servers: int) -> float:
    between = servers if servers > 1 else 0
    return max(0, size - 1 - between) * RING_HOP_S + between * NETWORK_HOP_S


def all_reduce(num_bytes: float, size: int, bandwidth: float) -> float:
    """Seconds of a ring all-reduce; a reduce-scatter or an all-gather takes half."""
    return 2 * (size - 1) / size * num_bytes / bandwidth


def sent_to_all(cluster: Cluster, members: Members, num_bytes: float, copies: int = 0) -> float:
    """Seconds that the links of a device take for an all-to-all, see `all_to_all`; without starting messages."""
    size = members.size
    seconds = 0.0
    for number, level in enumerate(reached(cluster, members)):
        others, sent = level.within - level.below, num_bytes
        if copies:  # a library: each place that has some of them gets one
            places = size / members.counts[0] if number else size
            sent *= places * (1 - (1 - 1 / places) ** copies) / copies
        seconds += others / size * sent / level.all_to_all_bytes_per_s + others * level.latency_s
    return seconds


def all_to_all(cluster: Cluster, num_bytes: float, groups: Iterable[Members], copies: int = 0) -> float:
    """Seconds in which every device of a group sends each other its part of `num_bytes`: within a node over its links, to
    others over the device's own, each message after the other. The slowest of the groups. `copies`: of what each row is among
    them, of which a device or another node is sent one, by a library for experts."""
    return max(sent_to_all(cluster, members, num_bytes, copies) + (members.size - 1) * MESSAGE_S for members in groups)


class Rates:
    """Rates that one device and its tensor parallel group reach."""

    def __init__(self, dims: Dimensions, job: Parallelism, cluster: Cluster):
        fitted, self.cluster, self.experts = cluster.fitted, cluster, cluster.fitted_experts
        faster = {"fp8": fitted.fp8, "fp32": float32_speed(cluster)}.get(job.precision, 1.0)
        self.flops = cluster.peak_tflops * 1e12 * fitted.matmul * faster
        self.head_flops = self.flops / (faster if job.precision == "fp8" else 1.0)  # libraries keep the head in bf16
        aligned = dims.head_size % cluster.alignment == 0
        share = job.attention_share or fitted.attention
        self.attention_flops = cluster.peak_tflops * 1e12 * share * (1.0 if aligned else 1 / 12)
        self.bytes = cluster.memory_gb_per_s * 1e9 * fitted.memory
        self.overhead = fitted.layer_overhead_us * 1e-6 if job.captured == "none" else 0.0
        self.expert_overhead = self.experts.layer_overhead_us * 1e-6 if job.captured != "all" else 0.0
        self.tp = axes_bandwidth(cluster, job, ("tp",), job.tp, 1)
        self.cp = self.tp  # as published runs were fitted: their engines pass keys and values on while they compute
        if job.own_graphs:
            self.cp = axes_bandwidth(cluster, job, ("cp",), job.cp, job.tp)
        self.width = job.activation_bytes
        self.factor_width = 1 if job.precision == "fp8" else self.width

    def matmul(self, m: float, n: float, k: float) -> float:
        """Seconds of (m, k) x (k, n): the arithmetic, and then each matrix once through memory.

        The second term makes products with a short side less efficient, as they are.
        """
        moved = self.factor_width * (m * k + k * n) + self.width * m * n
        return 2 * m * n * k / self.flops + moved / self.bytes
