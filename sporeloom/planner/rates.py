# SPDX-License-Identifier: Apache-2.0
"""Rates that a device and its links reach: seconds of products, and of collectives by the bytes they move."""

from __future__ import annotations

from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism

FLOAT32_SPEED = 0.5  # of matrix products, relative to bf16: no published run in the fit computes so
KERNEL_HEAD = 128  # fused attention kernels take as long for narrower heads
MESSAGE_S = 2e-6  # to send one of an all-to-all's messages off, however short: published latencies of small messages


def group_bandwidth(cluster: Cluster, size: int, stride: int) -> float:
    """Bytes/s at which a ring through every `stride`-th device moves data, for one device.

    Rings that leave a node share its links: of a group with k members in a node each member brings one device's link.
    """
    in_node = min(size, max(1, cluster.devices_per_node // stride))
    intra = cluster.intra_node_gb_per_s * cluster.fitted.intra_node
    if size <= in_node:
        return intra * 1e9
    return min(intra, in_node * cluster.inter_node_gb_per_s * cluster.fitted.inter_node) * 1e9


def float32_speed(cluster: Cluster) -> float:
    """Speed of matrix products in float32, relative to bf16."""
    measured = cluster.fitted.float32
    return FLOAT32_SPEED if measured is None else measured


def all_reduce(num_bytes: float, size: int, bandwidth: float) -> float:
    """Seconds of a ring all-reduce; a reduce-scatter or an all-gather takes half."""
    return 2 * (size - 1) / size * num_bytes / bandwidth


def all_to_all(num_bytes: float, size: int, stride: int, rates: Rates, copies: int = 0) -> float:
    """Seconds in which every device sends each of `size`, every `stride`-th, its part of `num_bytes`: within a node over its
    links, to others over the device's own, each message after the other. `copies`: of what each row is among them, of which
    a node is sent one."""
    cluster = rates.cluster
    in_node = min(size, max(1, cluster.devices_per_node // stride))
    near = (in_node - 1) / size * num_bytes / (cluster.intra_node_gb_per_s * cluster.fitted.intra_node * 1e9)
    nodes = size / in_node
    if copies:
        num_bytes *= nodes * (1 - (1 - 1 / nodes) ** copies) / copies
    far = (size - in_node) / size * num_bytes / (cluster.inter_node_gb_per_s * cluster.fitted.inter_node * 1e9)
    return near + far + (size - 1) * MESSAGE_S


class Rates:
    """Rates that one device and its tensor parallel group reach."""

    def __init__(self, dims: Dimensions, job: Parallelism, cluster: Cluster):
        fitted, self.cluster, self.experts = cluster.fitted, cluster, cluster.fitted_experts
        faster = {"fp8": fitted.fp8, "fp32": float32_speed(cluster)}.get(job.precision, 1.0)
        self.flops = cluster.peak_tflops * 1e12 * fitted.matmul * faster
        aligned = dims.head_size % cluster.alignment == 0
        self.attention_flops = cluster.peak_tflops * 1e12 * fitted.attention * (1.0 if aligned else 1 / 12)
        if dims.num_experts:
            self.attention_flops *= self.experts.attention
        self.bytes = cluster.memory_gb_per_s * 1e9 * fitted.memory
        self.overhead = fitted.layer_overhead_us * 1e-6
        self.tp = group_bandwidth(cluster, job.tp, 1)
        self.width = job.activation_bytes
        self.factor_width = 1 if job.precision == "fp8" else self.width

    def matmul(self, m: float, n: float, k: float) -> float:
        """Seconds of (m, k) x (k, n): the arithmetic, and then each matrix once through memory.

        The second term makes products with a short side less efficient, as they are.
        """
        moved = self.factor_width * (m * k + k * n) + self.width * m * n
        return 2 * m * n * k / self.flops + moved / self.bytes
