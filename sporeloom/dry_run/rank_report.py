# SPDX-License-Identifier: Apache-2.0
"""What one rank's compiled graph is, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sporeloom.parallel.report import Report


@dataclass(frozen=True)
class Collective:
    """One kind of communication of one phase, over one group, of one size."""

    kind: str
    phase: str
    group: str
    count: int
    """Times a step."""
    bytes_each: int
    """Of the whole tensor it works on: what an all-reduce or a send gives, an all-gather gives, a reduce-scatter takes."""

    @property
    def bytes_per_step(self) -> int:
        return self.count * self.bytes_each


@dataclass(frozen=True)
class RankParameter:
    """A parameter as a rank holds it."""

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layout: list[list[str]]
    """Mesh axes that shard each dim."""
    optimizer_shards: int
    num_bytes: int
    rule: str
    """file:line of the rule that says so; empty: none, whole on every rank."""


@dataclass(frozen=True)
class RankReport:
    """What one rank's graph is."""

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
    order_of_copies: list[tuple[int, str]] = field(default_factory=list)
    """Copy and place of each collective of a forward pass, of a model with two layers; where a microbatch has copies."""
    moved_bytes: int = 0
    """Activations to the host in a step, and as many back."""
    host_optimizer_bytes: int = 0
    """Moments that lie on the host, not on the device."""
    passed_bytes: int = 0
    """Of the results of all operators but matrix products, in a step."""
    in_float32: bool = False
    """Whether a matrix product is."""
    compiled_layers: list[int] = field(default_factory=list)
    """Layers of the stage in each graph that was compiled, where the full depth was derived from smaller ones."""


def rank_parameters(report: Report, shapes: Mapping[str, tuple[int, ...]]) -> list[RankParameter]:
    """The parameters that a rank's graphs use, in the order of the network.

    Args:
        shapes: those of a rank's parts, by name.
    """
    found = []
    for p in report.parameters:
        if (shape := shapes.get(p.name)) is not None:
            layout = [list(dim) for dim in p.layout]
            num_bytes = 4 * math.prod(shape)
            found.append(RankParameter(p.name, p.global_shape, shape, layout, p.optimizer_shards, num_bytes, p.rule))
    return found
