# SPDX-License-Identifier: Apache-2.0
"""Report of `parallelize`: each parameter's shards, and what no rule covers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sporeloom.parallel.rule_table import RuleTable
from sporeloom.strategy.config import Rule
from sporeloom.strategy.layout import Layout, Shape, show
from sporeloom.strategy.mesh import Mesh


@dataclass(frozen=True)
class ParameterReport:
    """One parameter under a strategy."""

    name: str
    global_shape: Shape
    local_shape: Shape
    """Shape on each rank that holds it, after optimizer parallel."""
    layout: Layout
    """Layout by its operator's rule; optimizer parallel shards dim 0 further."""
    optimizer_shards: int
    """Number of ranks over which optimizer parallel shards dim 0 further; 1: not at all."""
    stage: int
    rule: str
    """file:line of the rule that owns it; `derived`: MindSpore's propagation sharded it without a rule; empty:
    every rank holds it unsharded."""

    @property
    def num_parts(self) -> int:
        """Number of different shards of the parameter among the ranks of its stage."""
        return math.prod(self.global_shape) // math.prod(self.local_shape)


@dataclass(frozen=True)
class Report:
    """The result of `parallelize`, as data and as text."""

    mesh: Mesh
    parameters: list[ParameterReport]
    unmatched_rules: list[str]
    """Optional rules that matched nothing, with file:line."""
    optimizer_parallel: bool
    layers_of_stages: list[list[str]] = field(default_factory=list)
    stage_of_loss: int = 0
    """Pipeline stage that computes it."""
    recomputed: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    """Parameters that several stages of a pipeline hold. Training updates them on the stage that owns them, and
    sends them in each step; the copies of the others are outdated until `Engine.refresh`."""

    parts: dict[str, int] = field(default_factory=dict, repr=False)
    """Path of a Cell -> the part of the model, in the order of the layers, that a pipeline assigned it to."""

    reshards: bool = False
    """Whether weights are gathered anew for the forward and the backward pass (ZeRO-3 / FSDP)."""
    is_spmd: bool = False
    """Whether the graph is compiled for one device and sharded afterwards: then nothing in it may depend on the
    mesh."""
    rules: RuleTable = field(default_factory=RuleTable, repr=False)
    """The rules of the strategy and what they match."""

    functional: list[Rule] = field(default_factory=list, repr=False)
    """Rules for operators that are not attributes of a Cell, which are matched with the compiled graph."""

    @property
    def compiled_mesh(self) -> Mesh:
        """Mesh that the compiler is configured for."""
        return Mesh() if self.is_spmd else self.mesh

    def norm_shares(self, names: Sequence[str], rank: int) -> tuple[float, ...]:
        """Fraction of each gradient's square sum that `rank` adds to the global norm, so that every entry counts
        once.

        A tied parameter is held by several stages, but its whole gradient by the stage that owns it.
        """
        if self.is_spmd:
            return (1.0,) * len(names)
        stage = self.mesh.coordinate(rank, "pp")
        reports = [self.of(name) for name in names]
        return tuple(p.num_parts / self.mesh.stage_size if p.stage == stage else 0.0 for p in reports)

    def place(self, name: str, stage: int) -> None:
        """Record the first stage that uses a parameter."""
        if (known := self.by_name.get(name)) is not None and known.stage != stage:
            learned = dataclasses.replace(known, stage=stage)
            self.parameters[self.parameters.index(known)] = self.by_name[name] = learned

    def of(self, name: str) -> ParameterReport:
        """The report of a parameter, or of the one an optimizer state `prefix.name` belongs to."""
        return self.by_name[name] if name in self.by_name else self.by_name[name.partition(".")[2]]

    @functools.cached_property
    def by_name(self) -> dict[str, ParameterReport]:
        return {p.name: p for p in self.parameters}

    def to_dict(self) -> dict[str, object]:
        values = dataclasses.asdict(dataclasses.replace(self, rules=RuleTable(), parts={}, functional=[]))
        del values["rules"], values["parts"], values["functional"]
        for parameter in values["parameters"]:
            parameter["layout"] = show(parameter["layout"])
        return values

    def __str__(self) -> str:
        lines = [f"mesh {self.mesh}; {len(self.parameters)} parameters"]
        width = max((len(p.name) for p in self.parameters), default=0)
        for p in self.parameters:
            shards = f" /{p.optimizer_shards}" if p.optimizer_shards > 1 else ""
            lines.append(
                f"  {p.name:{width}}  {p.global_shape!s:>16} -> {p.local_shape!s:<16} {show(p.layout) + shards:<18} "
                f"stage {p.stage}  {p.rule or 'whole on every rank'}"
            )
        for stage, layers in enumerate(self.layers_of_stages):
            lines.append(f"  stage {stage}: {', '.join(layers)}")
        if self.recomputed:
            lines.append(f"  recomputed: {', '.join(self.recomputed)}")
        for rule in self.unmatched_rules:
            lines.append(f"  matched nothing: {rule}")
        return "\n".join(lines)
