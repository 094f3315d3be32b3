# SPDX-License-Identifier: Apache-2.0
"""Count what one rank of a partitioned step holds, sends and computes. Ranks of one stage differ only in their groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.memory.run import memory_timeline, pool_bytes
from sporeloom.dry_run.partitioned import Partitioned, partition_model
from sporeloom.dry_run.rank_report import RankParameter, RankReport, StepCost, rank_parameters
from sporeloom.dry_run.time.run import step_times
from sporeloom.dry_run.walk import PHASE_OF_PASS
from sporeloom.dry_run.work import Work, add_work, between, phases_of
from sporeloom.models.config import ModelConfig
from sporeloom.partition.graph import Graph, Name, TensorType
from sporeloom.partition.sharded_graph import item_size
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask
from sporeloom.runtime.spmd.step_graphs import types_of
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape

MOMENTS = ("adam_m.", "adam_v.")


def compile_ranks(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    ranks: Sequence[int],
    batch: tuple[int, int],
    inference: bool = False,
    accumulate: int = 1,
    task: TrainedTask = PLAIN_TEXT,
    auxiliary: Mapping[int, Mapping[str, int]] | None = None,
    cluster: Cluster | None = None,
) -> list[RankReport]:
    """Compile a model once, and report what some ranks hold and do.

    Args:
        batch: sequences of a step over all ranks, and their tokens.
        accumulate: gradient accumulation steps without a pipeline.
        auxiliary: rank -> bytes of other memory that it holds during the whole step, by name; with it, timelines are
            reported.
        cluster: on which a step is simulated, if given.

    Raises:
        ConfigError: it cannot be partitioned.
    """
    partitioned = partition_model(family, model, strategy, batch, inference, accumulate, task)
    step = step_times(partitioned, cluster) if cluster else None
    reports = [dataclasses.replace(rank_report(partitioned, rank), step=step) for rank in ranks]
    if auxiliary is None:
        return reports
    return [
        dataclasses.replace(report, memory=memory_timeline(partitioned, report.rank, auxiliary.get(report.rank)))
        for report in reports
    ]


def step_cost(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    ranks: Sequence[int],
    batch: tuple[int, int],
    accumulate: int,
    task: TrainedTask,
    auxiliary: Mapping[int, Mapping[str, int]],
    cluster: Cluster,
) -> StepCost:
    """Simulate the time of a step and the memory of some ranks, as `compile_ranks` does, and nothing else.

    Raises:
        ConfigError: it cannot be partitioned.
    """
    partitioned = partition_model(family, model, strategy, batch, False, accumulate, task)
    return cost_of(partitioned, ranks, auxiliary, cluster)


def cost_of(
    partitioned: Partitioned, ranks: Sequence[int], auxiliary: Mapping[int, Mapping[str, int]], cluster: Cluster
) -> StepCost:
    """Simulate a partitioned step."""
    step = step_times(partitioned, cluster)
    pools = {rank: pool_bytes(partitioned, rank, auxiliary.get(rank)) for rank in ranks}
    return StepCost(max(of.end for of in step.values()), pools)


def rank_report(partitioned: Partitioned, rank: int) -> RankReport:
    """Report what `rank` holds and does.

    Raises:
        ConfigError: its shard of a parameter is not the one that the rules define.
    """
    strategy, report = partitioned.strategy, partitioned.report
    stage = strategy.mesh.coordinate(rank, "pp")
    work = _work(partitioned, rank, stage)
    passes = partitioned.cut.stages.passes
    graphs = [made.graph for one, made in passes.items() if strategy.stage_of_part(one.part) == stage]
    updated = _local_shapes([*graphs, *([partitioned.update.graphs[stage]] if partitioned.update else [])])
    parameters = _parameters(partitioned, _local_shapes(graphs) if graphs else updated)
    moments = _moment_bytes([*graphs, *([partitioned.update.graphs[stage]] if partitioned.update else [])])
    layers = report.layers_of_stages[stage] if report.layers_of_stages else []
    return RankReport(
        rank=rank,
        stage=stage,
        layers=layers,
        recomputed=[layer for layer in report.recomputed if layer in layers],
        parameters=parameters,
        parameter_bytes=sum(p.num_bytes for p in parameters),
        optimizer_bytes=0 if strategy.optimizer_on_host else moments,
        gradient_bytes=_gradient_bytes(partitioned, parameters, stage),
        groups=work.groups,
        collectives=work.sorted_collectives(),
        flops=dict(work.flops),
        compile_s=partitioned.seconds,
        passed_bytes=work.passed_bytes,
        in_float32=work.in_float32,
        num_microbatches=partitioned.num_passes,
        host_optimizer_bytes=moments if strategy.optimizer_on_host else 0,
    )


def _work(partitioned: Partitioned, rank: int, stage: int) -> Work:
    work, cut, grid = Work(), partitioned.cut.stages, partitioned.cut.sharded.grid
    graph = partitioned.cut.sharded.result.graph
    types, phases = types_of(graph), phases_of(graph)
    for one, made in cut.passes.items():
        if partitioned.strategy.stage_of_part(one.part) == stage:
            times = 1 if one.kind == "parameters" else partitioned.num_passes
            known = types | types_of(made.graph)
            add_work(work, made.graph, known, phases, PHASE_OF_PASS[one.kind], times, grid, rank)
    _add_messages(work, partitioned, rank, stage, types)
    if partitioned.update:
        graph = partitioned.update.graphs[stage]
        phases = {} if cut.passes else phases  # a batch that is not divided has its passes in there, too
        add_work(work, graph, types_of(graph), phases, "optimizer", 1, partitioned.update.sharded.grid, rank)
    return work


def _add_messages(
    work: Work, partitioned: Partitioned, rank: int, stage: int, types: Mapping[Name, TensorType]
) -> None:
    """Count what this stage sends to others and receives from them."""
    cut, mesh, stage_of = partitioned.cut.stages, partitioned.strategy.mesh, partitioned.strategy.stage_of_part
    for name, takers in cut.takers.items():
        giver = cut.givers[name]
        source, phase = stage_of(giver.part), PHASE_OF_PASS[giver.kind]
        num_bytes = types[name].num_elements * item_size(types[name].dtype)
        for target in sorted({stage_of(taker.part) for taker in takers} - {source}):
            if stage in (source, target):
                kind, other = ("Send", target) if stage == source else ("Receive", source)
                peer = rank + (other - stage) * mesh.stage_size
                group = between(sorted([source, target]))
                work.add_message(kind, phase, group, sorted([rank, peer]), num_bytes, partitioned.num_passes)


def _local_shapes(graphs: Collection[Graph]) -> dict[str, Shape]:
    """Local shapes of the parameters that some graphs use, by name."""
    return {full.rpartition(":")[2]: type.shape for graph in graphs for full, type in graph.parameters.items()}


def _moment_bytes(graphs: Collection[Graph]) -> int:
    """Bytes of the optimizer's moments that some graphs use."""
    types = {full.rpartition(":")[2]: type for graph in graphs for full, type in graph.parameters.items()}
    return sum(t.num_elements * item_size(t.dtype) for name, t in types.items() if name.startswith(MOMENTS))


def _parameters(partitioned: Partitioned, held: Mapping[str, Shape]) -> list[RankParameter]:
    """Parameters of the network that a rank holds, in the network's order, compared with the rules."""
    found = rank_parameters(partitioned.report, held)
    problems = [
        f"{p.rule or partitioned.strategy.source}: {p.name} is {list(p.local_shape)} on a rank instead of {list(of_rule)}"
        for p in found
        if p.local_shape != (of_rule := partitioned.report.of(p.name).local_shape)
    ]
    if problems:
        raise ConfigError(problems[:8])
    return found


def _gradient_bytes(partitioned: Partitioned, parameters: Sequence[RankParameter], stage: int) -> int:
    """Bytes of the gradients that a rank accumulates over microbatches, as they are sharded before the update; without
    accumulation as large as the trained parameters."""
    if partitioned.update is None or not partitioned.cut.stages.passes:
        return sum(p.num_bytes for p in parameters if p.name in partitioned.trained)
    types, stage_of = types_of(partitioned.cut.sharded.result.graph), partitioned.strategy.stage_of_part
    for made in partitioned.cut.stages.passes.values():
        types |= types_of(made.graph)
    results = partitioned.cut.stages.results
    sizes = [
        max(types[name].num_elements * item_size(types[name].dtype) for name in of_stage)
        for position in partitioned.summed
        if (of_stage := [name for part, name in results[position].items() if stage_of(part) == stage])
    ]
    return sum(sizes)
