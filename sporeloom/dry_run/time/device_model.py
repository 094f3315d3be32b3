# SPDX-License-Identifier: Apache-2.0
"""Seconds that an operator or a collective takes on a device of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from sporeloom.planner.cluster import Cluster
from sporeloom.planner.collectives import Choice, collective
from sporeloom.planner.rates import KERNEL_HEAD, float32_speed

KERNELS_OF_LAYER = 16
"""Kernels of a dense layer's forward pass after fusion: the fit counts launches and gaps by layer."""
MISALIGNED = 12
"""Factor of the time of attention whose heads miss the matrix unit (docs/explanation/planner.md)."""


class DeviceModel:
    """Costs on one device of a cluster. Each kernel also costs `launch` seconds, each call of a graph `graph` seconds.

    `stage_size`: ranks of a pipeline stage, which wait for the slowest of their groups; 0: for the one given. `devices`: of
    the job, whose stages send at once. If `one_at_a_time`, no two operators of a graph run at once, collectives included.
    """

    def __init__(self, cluster: Cluster, stage_size: int = 0, devices: int = 0):
        fitted, self.cluster, self.stage_size, self.devices = cluster.fitted, cluster, stage_size, devices
        self.flops = cluster.peak_tflops * 1e12 * fitted.matmul
        self.attention_flops = cluster.peak_tflops * 1e12 * fitted.attention
        self.bytes = cluster.memory_gb_per_s * 1e9 * fitted.memory
        self.float32 = float32_speed(cluster)
        launch_us = fitted.layer_overhead_us / KERNELS_OF_LAYER if fitted.launch_us is None else fitted.launch_us
        self.launch, self.graph = launch_us * 1e-6, fitted.graph_us * 1e-6
        measured = cluster.measured[0] if cluster.measured else None
        self.operators = {line.kind: line for line in measured.operators} if measured else {}
        self.one_at_a_time = measured is not None and measured.operators_at_once == 1

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

    def collective(self, kind: str, num_bytes: float, ranks: Sequence[int]) -> Choice:
        """Algorithm and seconds of a collective or message.

        Args:
            num_bytes: of the unsharded tensor.
            ranks: that take part, in ascending order.
        """
        return collective(self.cluster, kind, num_bytes, ranks, self.stage_size, self.devices)
