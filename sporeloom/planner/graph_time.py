# SPDX-License-Identifier: Apache-2.0
"""Estimate the step time of any compiled graph from counted operators: for networks without a closed form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sporeloom.planner.cluster import Cluster
from sporeloom.planner.collectives import collective
from sporeloom.planner.rates import float32_speed

MESSAGES = {"Send": "Message", "Receive": "Message"}


@dataclass(frozen=True)
class GraphTime:
    """Seconds of one step of one rank, without overlap; operator launches are not counted."""

    matmul: float
    memory: float
    """Time of memory traffic: every other result is written once and read once; operators that a chip fuses take
    less."""
    communication: float
    bubble: float
    """Idle time of a pipeline whose stages take equally long."""

    @property
    def total(self) -> float:
        return self.matmul + self.memory + self.communication + self.bubble


def graph_time(
    flops: float,
    passed_bytes: float,
    collectives: Iterable[tuple[int, str, float, Sequence[int]]],
    cluster: Cluster,
    *,
    in_float32: bool,
    idle: float = 0.0,
    stage_size: int = 0,
    devices: int = 0,
) -> GraphTime:
    """Estimate the time of a rank on `cluster`.

    Args:
        flops: of all matrix products.
        passed_bytes: of the results of all other operators.
        collectives: how many in a step, kind, bytes of the full tensor, and the ranks that take part.
        in_float32: products are; else in half precision.
        idle: for what share of its work a stage waits in a pipeline.
        stage_size: ranks of a stage, which wait for the slowest of their groups; 0: for the one given.
        devices: of the job, whose other stages send meanwhile, too.
    """
    fitted = cluster.fitted
    matmul = flops / (cluster.peak_tflops * 1e12 * fitted.matmul * (float32_speed(cluster) if in_float32 else 1.0))
    memory = 2 * passed_bytes / (cluster.memory_gb_per_s * 1e9 * fitted.memory)
    communication = sum(
        count * collective(cluster, MESSAGES.get(kind, kind), size, sorted(ranks), stage_size, devices).seconds
        for count, kind, size, ranks in collectives
    )
    return GraphTime(matmul, memory, communication, idle * (matmul + memory))
