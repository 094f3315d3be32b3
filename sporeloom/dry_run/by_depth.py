# SPDX-License-Identifier: Apache-2.0
"""Extrapolate a stage of many equal layers from compilations of a few.

Every layer of one kind adds the same parameters, collectives and products to its stage. So a stage with one layer of
each kind, and one with a layer more, determine any number of layers. Kinds are: recomputed, not recomputed, and the model's
last layer, which may be built differently and stays as it is. The result is exact: tests compare it with full compilations.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sporeloom.dry_run.rank_report import Collective, RankParameter, RankReport
from sporeloom.models.config import ModelConfig
from sporeloom.strategy.config import Recompute, Stages, Strategy
from sporeloom.strategy.stages import layers_per_stage, recomputed_layers

Key = TypeVar("Key")


@dataclass(frozen=True)
class StageLayers:
    """Layers of one stage, each recomputed or not, without the model's last layer."""

    stage: int
    first: int
    """Number of its first layer."""
    recomputed: tuple[bool, ...]
    last: bool | None
    """Whether the model's last layer is recomputed, if this stage has it; None otherwise."""

    def count(self, kind: bool) -> int:
        """Number of layers of a kind."""
        return self.recomputed.count(kind)


def reduced_depths(model: ModelConfig, strategy: Strategy, rank: int) -> list[tuple[ModelConfig, Strategy]]:
    """List the models and strategies to compile `rank` of: with one layer of each kind, then with one more of each. A model
    with experts, whose layers differ and whose counters are exchanged together, is compiled at full depth, as is one with
    virtual stages."""
    if _needs_full_depth(model, strategy):
        return [(model, strategy)]
    layers = _layers_of(model, strategy, strategy.mesh.coordinate(rank, "pp"))
    few, many = _few_and_many(layers)
    depths = [few, *({**few, kind: 2} for kind in many)]
    return [_reduced(model, strategy, layers, depth) for depth in depths]


def full_depth(model: ModelConfig, strategy: Strategy, rank: int, compiled: Sequence[RankReport]) -> RankReport:
    """Extrapolate the report of `rank` at full depth from those of its `reduced_depths`."""
    if _needs_full_depth(model, strategy):
        return compiled[0]
    layers = _layers_of(model, strategy, strategy.mesh.coordinate(rank, "pp"))
    many = _few_and_many(layers)[1]
    more = dict(zip(many, compiled[1:], strict=True))
    return _extended(compiled[0], more, {kind: layers.count(kind) - 1 for kind in many}, layers, model)


def _needs_full_depth(model: ModelConfig, strategy: Strategy) -> bool:
    return model.experts is not None or strategy.pipeline.virtual_stages > 1


def _few_and_many(layers: StageLayers) -> tuple[dict[bool, int], list[bool]]:
    """Count one layer of each kind that occurs, and list the kinds that occur more often."""
    kinds = (True, False)
    return {kind: min(1, layers.count(kind)) for kind in kinds}, [kind for kind in kinds if layers.count(kind) > 1]


def _layers_of(model: ModelConfig, strategy: Strategy, stage: int) -> StageLayers:
    counts, recomputed = layers_per_stage(model.num_layers, strategy), recomputed_layers(model.num_layers, strategy)
    first = sum(counts[:stage])
    kinds = [layer in recomputed for layer in range(first, first + counts[stage])]
    last = kinds.pop() if stage == len(counts) - 1 else None
    return StageLayers(stage, first, tuple(kinds), last)


def _reduced(
    model: ModelConfig, strategy: Strategy, layers: StageLayers, few: Mapping[bool, int]
) -> tuple[ModelConfig, Strategy]:
    """Reduce this stage to `few` layers of each kind, recomputed ones first, and every other stage to one layer."""
    num_layers = few[True] + few[False] + (layers.last is not None)
    counts = [num_layers if stage == layers.stage else 1 for stage in range(strategy.mesh.pp)]
    first = layers.stage  # one layer in each stage before
    chosen = list(range(first, first + few[True])) + ([first + num_layers - 1] if layers.last else [])
    pipeline, recompute = strategy.pipeline, strategy.recompute
    if strategy.mesh.pp > 1:
        pipeline = dataclasses.replace(pipeline, stages=Stages(num_layers=counts))
    if recompute:
        recompute = Recompute(kind=recompute.kind, layers=chosen)
    reduced = dataclasses.replace(strategy, pipeline=pipeline, recompute=recompute)
    return model.with_layers(sum(counts)), reduced


def _extended(
    base: RankReport,
    more: Mapping[bool, RankReport],
    times: Mapping[bool, int],
    layers: StageLayers,
    model: ModelConfig,
) -> RankReport:
    def extrapolate(read: Callable[[RankReport], Mapping[Key, int]]) -> dict[Key, int]:
        """Compute base + times x (more - base) for each key."""
        start = read(base)
        total = Counter(start)
        for kind, report in more.items():
            found = read(report)
            for key in start.keys() | found.keys():
                total[key] += times[kind] * (found.get(key, 0) - start.get(key, 0))
        return {key: value for key, value in total.items() if value}

    sizes = extrapolate(
        lambda r: {
            "optimizer": r.optimizer_bytes,
            "gradient": r.gradient_bytes,
            "host": r.host_optimizer_bytes,
            "passed": r.passed_bytes,
        }
    )
    collectives = extrapolate(_collectives)
    last = model.layers[-1]
    names = _names(base, layers, last)
    parameters = _parameters(base, layers, last)
    numbered = names[: len(layers.recomputed)]
    recomputed = [name for name, chosen in zip(numbered, layers.recomputed, strict=True) if chosen]
    return dataclasses.replace(
        base,
        layers=names,
        recomputed=recomputed + (names[-1:] if layers.last else []),
        parameters=parameters,
        parameter_bytes=sum(p.num_bytes for p in parameters),
        optimizer_bytes=sizes.get("optimizer", 0),
        gradient_bytes=sizes.get("gradient", 0),
        host_optimizer_bytes=sizes.get("host", 0),
        passed_bytes=sizes.get("passed", 0),
        collectives=[Collective(k, p, g, times, size) for (k, p, g, size), times in sorted(collectives.items())],
        flops=extrapolate(lambda r: r.flops),
        groups={name: ranks for report in (base, *more.values()) for name, ranks in report.groups.items()},
        compiled_layers=[len(report.layers) for report in (base, *more.values())],
        compile_s=base.compile_s + sum(report.compile_s for report in more.values()),
    )


def _collectives(report: RankReport) -> dict[tuple[str, str, str, int], int]:
    return {(c.kind, c.phase, c.group, c.bytes_each): c.count for c in report.collectives}


def _names(base: RankReport, layers: StageLayers, last: str) -> list[str]:
    """Paths of all layers: MindSpore numbers the Cells of a list. `last`: the model's last layer, without a prefix."""
    found = [_renumbered(base.layers[0], layers.first + i) for i in range(len(layers.recomputed))]
    return found + ([_last_name(base, last)] if layers.last is not None else [])


def _last_name(base: RankReport, last: str) -> str:
    """Path of the last layer at full depth, where it may have another number than in the compiled model."""
    compiled = base.layers[-1]
    return _renumbered(compiled, int(last.rpartition(".")[2])) if last[-1].isdigit() else compiled


def _renumbered(path: str, number: int) -> str:
    return f"{path.rpartition('.')[0]}.{number}"


def _parameters(base: RankReport, layers: StageLayers, last: str) -> list[RankParameter]:
    """Repeat the parameters of the first numbered layer for all of them, and rename those of the last layer."""
    if layers.last is not None:
        old, new = f"{base.layers[-1]}.", f"{_last_name(base, last)}."
        renamed = [
            dataclasses.replace(p, name=new + p.name.removeprefix(old)) if p.name.startswith(old) else p
            for p in base.parameters
        ]
        base = dataclasses.replace(base, parameters=renamed)
    compiled = tuple(f"{path}." for path in base.layers[: -1 if layers.last is not None else None])
    of_first = [p for p in base.parameters if compiled and p.name.startswith(compiled[0])]
    if not of_first:
        return base.parameters
    copies = [
        dataclasses.replace(p, name=f"{name}.{p.name.removeprefix(compiled[0])}")
        for name in _names(base, layers, last)[: len(layers.recomputed)]
        for p in of_first
    ]
    start = base.parameters.index(of_first[0])
    before, after = (
        [p for p in part if not p.name.startswith(compiled)]
        for part in (base.parameters[:start], base.parameters[start:])
    )
    return before + copies + after
