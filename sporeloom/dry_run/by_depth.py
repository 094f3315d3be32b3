# SPDX-License-Identifier: Apache-2.0
"""A stage of many equal layers from a few of them: compile small depths, count on to the full one.

Every layer of one kind adds the same parameters, collectives and products to its stage. So a stage with one layer of
each kind, and one with a layer more, tell what any number of layers takes. Kinds are: recomputed, kept, and the model's
last layer, which may be built differently and stays as it is. Exact, not an estimate: tests hold it against whole compiles.
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
    """The layers of one stage, each told to be recomputed or not, without the model's last layer."""

    stage: int
    first: int
    """Number of its first layer."""
    recomputed: tuple[bool, ...]
    last: bool | None
    """Whether the model's last layer, if this stage has it, is recomputed; None: it has not."""

    def count(self, kind: bool) -> int:
        return self.recomputed.count(kind)


def small_depths(model: ModelConfig, strategy: Strategy, rank: int) -> list[tuple[ModelConfig, Strategy]]:
    """The models and strategies to compile `rank` of: with one layer of each kind, then with one more of each. A model with
    experts, whose layers need not be alike and whose counts travel together, is compiled whole, and one whose stages hold
    several parts of it or move layers to the host."""
    if _is_compiled_whole(model, strategy):
        return [(model, strategy)]
    layers = _layers_of(model, strategy, strategy.mesh.coordinate(rank, "pp"))
    few, many = _few_and_many(layers)
    depths = [few, *({**few, kind: 2} for kind in many)]
    return [_reduced(model, strategy, layers, depth) for depth in depths]


def full_depth(model: ModelConfig, strategy: Strategy, rank: int, compiled: Sequence[RankReport]) -> RankReport:
    """What compiling `rank` whole would report, from the reports of its `small_depths`."""
    if _is_compiled_whole(model, strategy):
        return compiled[0]
    layers = _layers_of(model, strategy, strategy.mesh.coordinate(rank, "pp"))
    many = _few_and_many(layers)[1]
    more = dict(zip(many, compiled[1:], strict=True))
    return _extended(compiled[0], more, {kind: layers.count(kind) - 1 for kind in many}, layers, model)


def _is_compiled_whole(model: ModelConfig, strategy: Strategy) -> bool:
    moves = strategy.offload is not None and bool(strategy.offload.layers)
    return model.experts is not None or strategy.pipeline.virtual_stages > 1 or moves


def _few_and_many(layers: StageLayers) -> tuple[dict[bool, int], list[bool]]:
    """One layer of each kind there is, and the kinds of which there are more."""
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
    """The same job with `few` layers of each kind in this stage, recomputed ones first, and one in every other."""
    mine = few[True] + few[False] + (layers.last is not None)
    counts = [mine if stage == layers.stage else 1 for stage in range(strategy.mesh.pp)]
    first = layers.stage  # one layer in each stage before
    chosen = list(range(first, first + few[True])) + ([first + mine - 1] if layers.last else [])
    pipeline, recompute = strategy.pipeline, strategy.recompute
    if strategy.mesh.pp > 1:
        pipeline = dataclasses.replace(pipeline, stages=Stages(num_layers=counts))
    if recompute:
        recompute = Recompute(kind=recompute.kind, layers=chosen)
    reduced = dataclasses.replace(strategy, pipeline=pipeline, recompute=recompute)
    return dataclasses.replace(model, num_layers=sum(counts)), reduced


def _extended(
    base: RankReport,
    more: Mapping[bool, RankReport],
    times: Mapping[bool, int],
    layers: StageLayers,
    model: ModelConfig,
) -> RankReport:
    def count_on(read: Callable[[RankReport], Mapping[Key, int]]) -> dict[Key, int]:
        """base + times x (more - base), of everything that is counted."""
        start = read(base)
        total = Counter(start)
        for kind, report in more.items():
            found = read(report)
            for key in start.keys() | found.keys():
                total[key] += times[kind] * (found.get(key, 0) - start.get(key, 0))
        return {key: value for key, value in total.items() if value}

    sizes = count_on(
        lambda r: {
            "optimizer": r.optimizer_bytes,
            "gradient": r.gradient_bytes,
            "host": r.host_optimizer_bytes,
            "passed": r.passed_bytes,
        }
    )
    collectives = count_on(_collectives)
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
        flops=count_on(lambda r: r.flops),
        groups={name: ranks for report in (base, *more.values()) for name, ranks in report.groups.items()},
        compiled_layers=[len(report.layers) for report in (base, *more.values())],
        compile_s=base.compile_s + sum(report.compile_s for report in more.values()),
    )


def _collectives(report: RankReport) -> dict[tuple[str, str, str, int], int]:
    return {(c.kind, c.phase, c.group, c.bytes_each): c.count for c in report.collectives}


def _names(base: RankReport, layers: StageLayers, last: str) -> list[str]:
    """Paths of all layers: MindSpore numbers the cells of a list. `last`: the model's last layer, without a prefix."""
    found = [_renumbered(base.layers[0], layers.first + i) for i in range(len(layers.recomputed))]
    return found + ([_last_name(base, last)] if layers.last is not None else [])


def _last_name(base: RankReport, last: str) -> str:
    """Its path at full depth; of another number in what was compiled, unless it has none."""
    compiled = base.layers[-1]
    return _renumbered(compiled, int(last.rpartition(".")[2])) if last[-1].isdigit() else compiled


def _renumbered(path: str, number: int) -> str:
    return f"{path.rpartition('.')[0]}.{number}"


def _parameters(base: RankReport, layers: StageLayers, last: str) -> list[RankParameter]:
    """What the first numbered layer has, for each of them; the last layer under its name; all else as it is."""
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
