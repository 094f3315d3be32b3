# SPDX-License-Identifier: Apache-2.0
"""Seconds that an operator or a collective takes on a device of a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sporeloom.planner.cluster import Cluster
from sporeloom.planner.members import Members, counterparts
from sporeloom.planner.rates import KERNEL_HEAD, MESSAGE_S, float32_speed, ring_bandwidth, sent_to_all

KERNELS_OF_LAYER = 16
"""Kernels of a dense layer's forward pass after fusion: the fit counts launches and gaps by layer."""
HALVES = ("AllGather", "ReduceScatter")
"""Collectives that are half of an all-reduce."""
MISALIGNED = 12
"""Factor of the time of attention whose heads miss the matrix unit (docs/explanation/planner.md)."""


class DeviceModel:
    """Costs on one device of a cluster. Each kernel also costs `launch` seconds, each call of a graph `graph` seconds.

    `stage_size`: ranks of a pipeline stage, which wait for the slowest of their groups; 0: for the one given.
    """

    def __init__(self, cluster: Cluster, stage_size: int = 0):
        fitted, self.cluster, self.stage_size = cluster.fitted, cluster, stage_size
        self.flops = cluster.peak_tflops * 1e12 * fitted.matmul
        self.attention_flops = cluster.peak_tflops * 1e12 * fitted.attention
        self.bytes = cluster.memory_gb_per_s * 1e9 * fitted.memory
        self.float32 = float32_speed(cluster)
        launch_us = fitted.layer_overhead_us / KERNELS_OF_LAYER if fitted.launch_us is None else fitted.launch_us
        self.launch, self.graph = launch_us * 1e-6, fitted.graph_us * 1e-6
        measured = cluster.measured[0] if cluster.measured else None
        self.operators = {line.kind: line for line in measured.operators} if measured else {}
        self.collectives = {(line.kind, line.ranks): line for line in measured.collectives} if measured else {}

    def product(self, flops: float, moved_bytes: float, in_float32: bool) -> float:
        """A matrix product: its arithmetic, then each matrix once through memory."""
        return flops / (self.flops * (self.float32 if in_float32 else 1.0)) + moved_bytes / self.bytes

    def attention(self, flops: float, head_size: int, in_one_kernel: bool) -> float:
        """Products of queries, keys and values. A fused kernel skips the masked half, and takes as long for narrow heads."""
        seconds = flops / self.attention_flops
        if head_size % self.cluster.alignment:
            seconds *= MISALIGNED
        return seconds * (0.5 * max(1.0, KERNEL_HEAD / head_size) if in_one_kernel else 1.0)

    def passes(self, moved_bytes: float) -> float:
        """Reading and writing memory."""
        return moved_bytes / self.bytes

    def operator(self, kind: str, moved_bytes: float) -> float:
        """An operator that passes over memory: as measured, else by its bytes."""
        line = self.operators.get(kind)
        return line.seconds(moved_bytes) if line else self.passes(moved_bytes)

    def host(self, moved_bytes: float) -> float:
        """Moving bytes to the host or back."""
        return moved_bytes / (self.cluster.host_gb_per_s * 1e9)

    def collective(self, kind: str, num_bytes: float, ranks: Sequence[int]) -> float:
        """A collective or message.

        Ranks double or halve what they have in each of log2(n) rounds, which moves no more than a ring and starts fewer
        messages; an all-to-all sends each rank its own.

        Args:
            num_bytes: of the unsharded tensor.
            ranks: that take part, in ascending order.
        """
        size = len(ranks)
        if size == 1:
            return 0.0
        if line := self.collectives.get((kind, size)):
            return line.seconds(num_bytes)
        groups = counterparts(self.cluster.units, tuple(ranks), self.stage_size)
        return max(self._between(kind, num_bytes, members) for members in groups)

    def _between(self, kind: str, num_bytes: float, members: Members) -> float:
        """Seconds of a collective whose members lie so."""
        size, bandwidth = members[-1], ring_bandwidth(self.cluster, members)
        if kind == "Message":
            return num_bytes / bandwidth + MESSAGE_S + self._rounds_latency(members)
        if kind == "AlltoAll":
            return sent_to_all(self.cluster, members, num_bytes) + (size - 1) * MESSAGE_S
        rounds = math.ceil(math.log2(size)) * MESSAGE_S + self._rounds_latency(members)
        half = (size - 1) / size * num_bytes / bandwidth + rounds
        return half if kind in HALVES else 2 * half

    def _rounds_latency(self, members: Members) -> float:
        """Seconds that messages between servers take longer in the rounds of a collective: in those that reach as far as
        each level."""
        return sum(
            math.ceil(math.log2(within / below)) * link.latency_s
            for link, below, within in zip(self.cluster.links, [1, *members], members, strict=False)
        )
