# SPDX-License-Identifier: Apache-2.0
"""What one rank of a partitioned step holds, sends and computes. The ranks of a stage do the same, over other groups."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from sporeloom.dry_run.partitioned import Partitioned, partition_model
from sporeloom.dry_run.rank_report import RankParameter, RankReport, rank_parameters
from sporeloom.dry_run.work import Work, add_work, between, phases_of
from sporeloom.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.partition.graph import Graph, Name, TensorType
from sporeloom.partition.held import item_size
from sporeloom.partition.stages import PassKind
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask
from sporeloom.runtime.cpu.step_graphs import types_of
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape

MOMENTS = ("adam_m.", "adam_v.")
PHASE_OF_PASS: dict[PassKind, str] = {
    "parameters": "forward",
    "forward": "forward",
    "backward": "backward",
    "weights": "backward",
}


def compile_ranks(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    ranks: Sequence[int],
    batch: tuple[int, int],
    inference: bool = False,
    accumulate: int = 1,
    task: TrainedTask = PLAIN_TEXT,
) -> list[RankReport]:
    """The reports of some ranks, of a model that is compiled once for all of them.

    Args:
        batch: sequences of a step over all ranks, and their tokens.
        accumulate: parts that the batch is split into without a pipeline.

    Raises:
        ConfigError: it cannot be partitioned.
    """
    done = partition_model(family, model, strategy, batch, inference, accumulate, task)
    return [stage_report(done, rank) for rank in ranks]


def stage_report(done: Partitioned, rank: int) -> RankReport:
    """The report of `rank`.

    Raises:
        ConfigError: it holds another part of a parameter than the rules say.
    """
    strategy, report = done.strategy, done.report
    stage = strategy.mesh.coordinate(rank, "pp")
    work = _work(done, rank, stage)
    graphs = [made.graph for one, made in done.cut.stages.passes.items() if strategy.stage_of_part(one.part) == stage]
    held = _local_shapes(graphs)
    parameters = _parameters(done, held)
    updated = _local_shapes([*graphs, *([done.update.graphs[stage]] if done.update else [])])
    moments = 4 * sum(math.prod(shape) for name, shape in updated.items() if name.startswith(MOMENTS))
    layers = report.layers_of_stages[stage] if report.layers_of_stages else []
    return RankReport(
        rank=rank,
        stage=stage,
        layers=layers,
        recomputed=[layer for layer in report.recomputed if layer in layers],
        parameters=parameters,
        parameter_bytes=sum(p.num_bytes for p in parameters),
        optimizer_bytes=0 if strategy.optimizer_on_host else moments,
        gradient_bytes=_gradient_bytes(done, parameters, stage),
        groups=work.groups,
        collectives=work.sorted_collectives(),
        flops=dict(work.flops),
        compile_s=done.seconds,
        moved_bytes=work.moved_bytes,
        passed_bytes=work.passed_bytes,
        in_float32=work.in_float32,
        host_optimizer_bytes=moments if strategy.optimizer_on_host else 0,
    )


def _work(done: Partitioned, rank: int, stage: int) -> Work:
    work, cut, grid = Work(), done.cut.stages, done.cut.sharded.grid
    whole = done.cut.sharded.result.graph
    types, phases = types_of(whole), phases_of(whole)
    for one, made in cut.passes.items():
        if done.strategy.stage_of_part(one.part) == stage:
            times = 1 if one.kind == "parameters" else done.times
            known = types | types_of(made.graph)
            add_work(work, made.graph, known, phases, PHASE_OF_PASS[one.kind], times, grid, rank)
    _add_messages(work, done, rank, stage, types)
    if done.update:
        graph = done.update.graphs[stage]
        add_work(work, graph, types_of(graph), {}, "optimizer", 1, done.update.sharded.grid, rank)
    return work


def _add_messages(work: Work, done: Partitioned, rank: int, stage: int, types: Mapping[Name, TensorType]) -> None:
    """Count what this stage sends to others and receives from them."""
    cut, mesh, stage_of = done.cut.stages, done.strategy.mesh, done.strategy.stage_of_part
    for name, takers in cut.takers.items():
        giver = cut.givers[name]
        source, phase = stage_of(giver.part), PHASE_OF_PASS[giver.kind]
        num_bytes = types[name].num_elements * item_size(types[name].dtype)
        for target in sorted({stage_of(taker.part) for taker in takers} - {source}):
            if stage in (source, target):
                kind, other = ("Send", target) if stage == source else ("Receive", source)
                peer = rank + (other - stage) * mesh.stage_size
                group = between(sorted([source, target]))
                work.add_message(kind, phase, group, sorted([rank, peer]), num_bytes, done.times)


def _local_shapes(graphs: Collection[Graph]) -> dict[str, Shape]:
    """The parameters that some graphs use, by name, as a rank holds them."""
    return {full.rpartition(":")[2]: type.shape for graph in graphs for full, type in graph.parameters.items()}


def _parameters(done: Partitioned, held: Mapping[str, Shape]) -> list[RankParameter]:
    """The parameters of the network that a rank holds, in the network's order."""
    found = rank_parameters(done.report, held)
    problems = [
        f"{p.rule}: {p.name} is {list(p.local_shape)} on a rank instead of {list(of_rule)}"
        for p in found
        if p.local_shape != (of_rule := done.report.of(p.name).local_shape)
    ]
    if problems:
        raise ConfigError(problems[:8])
    return found


def _gradient_bytes(done: Partitioned, parameters: Sequence[RankParameter], stage: int) -> int:
    """Bytes of the gradients that a rank adds up over microbatches, as they lie before the update; of a single one, as large
    as its parameters."""
    if done.update is None:
        return sum(p.num_bytes for p in parameters if p.name in done.trained)
    types, stage_of = types_of(done.cut.sharded.result.graph), done.strategy.stage_of_part
    for made in done.cut.stages.passes.values():
        types |= types_of(made.graph)
    sizes = [
        max(types[name].num_elements * item_size(types[name].dtype) for name in mine)
        for shares in done.cut.stages.results[1 : 1 + len(done.trained)]
        if (mine := [name for part, name in shares.items() if stage_of(part) == stage])
    ]
    return sum(sizes)
