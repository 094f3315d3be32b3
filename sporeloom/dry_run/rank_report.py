# SPDX-License-Identifier: Apache-2.0
"""Reports of single ranks as data: parameters, collectives, FLOPs, bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sporeloom.dry_run.memory.timeline import Timeline
from sporeloom.dry_run.time.simulate import RankTime
from sporeloom.parallel.report import Report


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind and phase, over one group and of one size; or messages between two stages."""

    kind: str
    phase: str
    group: str
    count: int
    """Number of them in a step."""
    bytes_each: int
    """Bytes of the unsharded tensor: the output of an all-reduce, an all-gather or a send, the input of a reduce-scatter."""

    @property
    def bytes_per_step(self) -> int:
        return self.count * self.bytes_each


@dataclass(frozen=True)
class RankParameter:
    """One rank's shard of a parameter."""

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layout: list[list[str]]
    """Mesh axes that shard each dim."""
    optimizer_shards: int
    num_bytes: int
    rule: str
    """file:line of the rule that shards it; empty: no rule does, and every rank holds all of it."""


@dataclass(frozen=True)
class RankReport:
    """Contents of one rank's graphs."""

    rank: int
    stage: int
    layers: list[str]
    recomputed: list[str]
    parameters: list[RankParameter]
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    groups: dict[str, list[int]]
    collectives: list[Collective]
    flops: dict[str, int]
    compile_s: float
    host_optimizer_bytes: int = 0
    """Bytes of the optimizer's moments on the host."""
    passed_bytes: int = 0
    """Bytes of the results of all operators but matrix products, in a step."""
    in_float32: bool = False
    """Whether some matrix product is computed in float32."""
    num_microbatches: int = 1
    """Number of times that the passes run in a step."""
    compiled_layers: list[int] = field(default_factory=list)
    """Number of layers of the stage in each compiled graph, where the full depth is extrapolated from smaller ones."""
    memory: Timeline | None = None
    """The memory over a step, if requested."""
    step: Mapping[int, RankTime] | None = None
    """The tasks of the first rank of every stage over a step, with their times, if requested."""


@dataclass(frozen=True)
class StepCost:
    """Simulated time and memory of a step."""

    seconds: float
    pool_bytes: dict[int, int]
    """Rank -> bytes of the pool that holds all allocations of its step."""

    @property
    def worst_rank(self) -> int:
        """The first rank that needs the most memory."""
        return max(self.pool_bytes, key=lambda rank: (self.pool_bytes[rank], -rank))

    @property
    def peak_bytes(self) -> int:
        """Memory of the worst rank."""
        return self.pool_bytes[self.worst_rank]


def rank_parameters(report: Report, shapes: Mapping[str, tuple[int, ...]]) -> list[RankParameter]:
    """List the parameters that a rank's graphs use, in the order of the network.

    Args:
        shapes: local shapes, by name.
    """
    found = []
    for p in report.parameters:
        if (shape := shapes.get(p.name)) is not None:
            layout = [list(dim) for dim in p.layout]
            num_bytes = 4 * math.prod(shape)
            found.append(RankParameter(p.name, p.global_shape, shape, layout, p.optimizer_shards, num_bytes, p.rule))
    return found
