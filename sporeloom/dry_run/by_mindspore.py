# SPDX-License-Identifier: Apache-2.0
"""Compile the training or inference graph of one rank by MindSpore's partitioner, without its weights, and count what it
holds and does. `engine: mindspore`; the other engine's is `compile.py`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from sporeloom.dry_run.cells import custom_cell, model_cell
from sporeloom.dry_run.copies import order_of_copies
from sporeloom.dry_run.mindspore_work import read_work
from sporeloom.dry_run.rank_report import RankReport, rank_parameters
from sporeloom.models.config import ModelConfig
from sporeloom.parallel.report import Report
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask
from sporeloom.runtime.cpu.compilation_cache import cached_graph, strategy_key
from sporeloom.runtime.cpu.partition import PartitionedGraph, partition
from sporeloom.runtime.cpu.reduced import check_reduced
from sporeloom.runtime.cpu.target import WORLD, virtual_ascend
from sporeloom.runtime.environment import prepare_environment
from sporeloom.runtime.layouts import learn_layouts
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape


def compile_rank(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    rank: int,
    batch: tuple[int, int],
    inference: bool = False,
    accumulate: int = 1,
    task: TrainedTask = PLAIN_TEXT,
) -> RankReport:
    """Everything about `rank`. Needs a process of its own.

    `batch`: sequences of a step over all ranks and their tokens. `accumulate`: parts it is split into without a pipeline.
    """
    strategy = strategy.by_mindspore()
    prepare_environment()
    gc.disable()  # millions of small objects, none in cycles, before and after the compilation, too
    of_rank = rank, all_reduce_of(rank, strategy)
    built = model_cell(family, model, strategy, batch, inference, accumulate, task, *of_rank)
    key = {"dry_run": family, "model": model.to_dict(), "strategy": strategy_key(strategy), "rank": rank}
    key |= {"batch": batch, "inference": inference, "accumulate": accumulate}
    key |= {"task": task.about()}
    graph = cached_graph(key, lambda: partition(built.cell, strategy, rank, built.inputs))
    order = [] if inference else _order_of_copies(family, model, strategy, rank, batch, accumulate, task)
    return replace(_report(graph, built.report, strategy, built.trained), order_of_copies=order)


def compile_ranks(
    family: str, model: ModelConfig, strategy: Strategy, ranks: Sequence[int], *options: Any
) -> list[RankReport]:
    """As `compile_rank`, of one rank: each needs a process of its own."""
    (rank,) = ranks
    return [compile_rank(family, model, strategy, rank, *options)]


def compile_own_rank(
    make: Callable[[], nn.Cell], strategy: Strategy, rank: int, inputs: Sequence[tuple[Shape, Any]]
) -> RankReport:
    """As `compile_rank`, a step of AdamW of a user's network, which returns its loss. Needs a process of its own.

    Args:
        make: makes the network.
        inputs: global shape and NumPy dtype of each.

    Raises:
        ConfigError: MindSpore cannot partition it, lays a parameter out otherwise than its rule says, or leaves a gradient
            that several ranks have a part of.
    """
    strategy = strategy.by_mindspore()
    built = custom_cell(make, strategy, inputs, rank, all_reduce_of(rank, strategy))
    graph = partition(built.cell, strategy, rank, inputs)
    check_reduced(graph, strategy, built.trained)
    return _report(graph, built.report, strategy, built.trained)


def all_reduce_of(rank: int, strategy: Strategy) -> ms.ops.AllReduce | None:
    """The sum over all ranks, in the graph of a rank; None on one device."""
    if strategy.mesh.size == 1:
        return None
    with virtual_ascend(rank, strategy.mesh.size):
        return ms.ops.AllReduce(group=WORLD)


def _report(graph: PartitionedGraph, report: Report, strategy: Strategy, trained: Collection[str]) -> RankReport:
    """`trained`: names of parameters; none of a network that is not trained."""
    learn_layouts(report, graph.held_layouts, graph.groups, graph.rank, strategy.source)
    stage = strategy.mesh.coordinate(graph.rank, "pp")
    work = read_work(graph, strategy.micro_batch_interleave if trained else 1)
    parameters = rank_parameters(report, graph.parameters)
    held = {p.name for p in parameters}

    def bytes_of(*prefixes: str) -> int:
        return sum(
            4 * int(np.prod(shape))
            for name, shape in graph.parameters.items()
            if any(name.startswith(prefix) and name.removeprefix(prefix) in held for prefix in prefixes)
        )

    layers = report.layers_of_stages[stage] if report.layers_of_stages else []
    accumulated = bytes_of("accu_grads.")
    return RankReport(
        rank=graph.rank,
        stage=stage,
        layers=layers,
        recomputed=[layer for layer in report.recomputed if layer in layers],
        parameters=parameters,
        parameter_bytes=sum(p.num_bytes for p in parameters),
        optimizer_bytes=0 if strategy.optimizer_on_host else bytes_of("adam_m.", "adam_v."),
        gradient_bytes=accumulated or sum(p.num_bytes for p in parameters if p.name in trained),
        groups={name: ranks for name, ranks in graph.groups.items() if len(ranks) > 1},
        collectives=work.sorted_collectives(),
        flops=dict(work.flops),
        compile_s=graph.compile_s,
        moved_bytes=work.moved_bytes,
        passed_bytes=work.passed_bytes,
        in_float32=work.in_float32,
        host_optimizer_bytes=bytes_of("adam_m.", "adam_v.") if strategy.optimizer_on_host else 0,
    )


def _order_of_copies(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    rank: int,
    batch: tuple[int, int],
    accumulate: int,
    task: TrainedTask,
) -> list[tuple[int, str]]:
    """Of two layers, whose order all others repeat. MindSpore orders copies where there is no pipeline."""
    if strategy.micro_batch_interleave == 1 or strategy.mesh.pp > 1:
        return []
    model, strategy = replace(model, num_layers=2), replace(strategy, recompute=None, offload=None)
    of_rank = rank, all_reduce_of(rank, strategy)
    built = model_cell(family, model, strategy, batch, False, accumulate, task, *of_rank)
    built.cell.network.apply(_write_out)
    key = {"order_of_copies": family, "model": model.to_dict(), "strategy": strategy_key(strategy), "rank": rank}
    key |= {"batch": batch, "accumulate": accumulate, "task": task.about()}
    graph = cached_graph(key, lambda: partition(built.cell, strategy, rank, built.inputs))
    return order_of_copies(graph.model, graph.groups)


def _write_out(cell: nn.Cell) -> None:
    if hasattr(cell, "cell_init_args"):
        cell.cell_init_args = ""
