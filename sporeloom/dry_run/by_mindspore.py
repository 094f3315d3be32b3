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
from mindspore.nn.utils import no_init_parameters

from sporeloom.dry_run.copies import order_of_copies
from sporeloom.dry_run.mindspore_work import read_work
from sporeloom.dry_run.rank_report import RankParameter, RankReport
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.parallel.cells import ShardBatch, average_over_all_rows, prepare_to_shard
from sporeloom.parallel.parallelize import keep_as_function, parallelize, wrap
from sporeloom.parallel.report import Report
from sporeloom.parallel.step import TrainStep
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask
from sporeloom.runtime.cpu.compilation_cache import cached_graph, strategy_key
from sporeloom.runtime.cpu.partition import PartitionedGraph, partition
from sporeloom.runtime.cpu.reduced import check_reduced
from sporeloom.runtime.cpu.target import WORLD, virtual_ascend
from sporeloom.runtime.environment import prepare_environment
from sporeloom.runtime.layouts import learn_layouts
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape
from sporeloom.tasks.example import task_network
from sporeloom.train.optim import AdamW


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
    cell, report, inputs, trained = _cell(family, model, strategy, rank, batch, inference, accumulate, task)
    key = {"dry_run": family, "model": model.to_dict(), "strategy": strategy_key(strategy), "rank": rank}
    key |= {"batch": batch, "inference": inference, "accumulate": accumulate}
    key |= {"task": task.about()}
    graph = cached_graph(key, lambda: partition(cell, strategy, rank, inputs))
    order = [] if inference else _order_of_copies(family, model, strategy, rank, batch, accumulate, task)
    return replace(_report(graph, report, strategy, trained), order_of_copies=order)


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
    with virtual_ascend(rank, strategy.mesh.size):
        all_reduce = ms.ops.AllReduce(group=WORLD)
    with no_init_parameters():
        net = make()
        prepare_to_shard(net)
        for _, cell in net.cells_and_names():
            average_over_all_rows(cell)
        report = parallelize(net, strategy)
        optimizer, around = AdamW(net.trainable_params()), wrap(ShardBatch(net, strategy.mesh), strategy)
        scale = 1 / strategy.num_parts()
        step = TrainStep(around, optimizer, report, rank, all_reduce, max_grad_norm=1.0, scale=scale).set_train()
    graph = partition(step, strategy, rank, inputs)
    trained = {parameter.name for parameter in optimizer.parameters}
    check_reduced(graph, strategy, trained)
    return _report(graph, report, strategy, trained)


def _report(graph: PartitionedGraph, report: Report, strategy: Strategy, trained: Collection[str]) -> RankReport:
    """`trained`: names of parameters; none of a network that is not trained."""
    learn_layouts(report, graph.held_layouts, graph.groups, graph.rank, strategy.source)
    stage = strategy.mesh.coordinate(graph.rank, "pp")
    work = read_work(graph, strategy.micro_batch_interleave if trained else 1)
    parameters = _parameters(report, graph.parameters)
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
        collectives=work.collectives,
        flops=work.flops,
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
    cell, _, inputs, _ = _cell(family, model, strategy, rank, batch, False, accumulate, task)
    cell.network.apply(_write_out)
    key = {"order_of_copies": family, "model": model.to_dict(), "strategy": strategy_key(strategy), "rank": rank}
    key |= {"batch": batch, "accumulate": accumulate, "task": task.about()}
    graph = cached_graph(key, lambda: partition(cell, strategy, rank, inputs))
    return order_of_copies(graph.model, graph.groups)


def _write_out(cell: nn.Cell) -> None:
    if hasattr(cell, "cell_init_args"):
        cell.cell_init_args = ""


def _cell(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    rank: int,
    batch: tuple[int, int],
    inference: bool,
    accumulate: int,
    task: TrainedTask,
) -> tuple[nn.Cell, Report, list[tuple[tuple[int, ...], Any]], set[str]]:
    """The network or training step of a rank, without its weights; what `parallelize` did; its inputs; what is trained."""
    with virtual_ascend(rank, strategy.mesh.size):
        all_reduce = ms.ops.AllReduce(group=WORLD) if strategy.mesh.size > 1 else None
    inputs: list[tuple[tuple[int, ...], Any]] = [(batch, np.int32)] * 2
    with no_init_parameters():
        net = family_module(family, "model").Model(model) if inference else task_network(family, model, task)
        keep_as_function(net)  # `graph` tells forward from backward, and both from the update, by the functions
        report = parallelize(net, strategy, whole=not inference)
        if inference:
            return net.set_train(False), report, inputs, set()
        inputs = [*inputs, (batch, np.int32), *[(batch, np.float32)] * (1 + net.loss.num_inputs)]
        inputs += [(batch, np.int32), (batch, np.float32)] * getattr(net, "num_mtp", 0)
        inputs += [(batch, np.int32)] if model.dropout_rate else []
        optimizer = AdamW(net.trainable_params(), on_host=strategy.optimizer_on_host)
        wrapped, options = wrap(net, strategy, accumulate), {"max_grad_norm": 1.0, "accumulate": accumulate}
        options["loss_scale"] = model.compute_dtype == "float16"
        step = TrainStep(wrapped, optimizer, report, rank, all_reduce, **options).set_train()
    return step, report, inputs, {parameter.name for parameter in optimizer.parameters}


def _parameters(report: Report, local_shapes: dict[str, tuple[int, ...]]) -> list[RankParameter]:
    """The parameters in a rank's graph, with the shapes the compiler gave them."""
    found = []
    for p in report.parameters:
        shape = local_shapes.get(p.name)
        if shape is None:
            continue
        layout = [list(dim) for dim in p.layout]
        num_bytes = 4 * int(np.prod(shape))
        found.append(RankParameter(p.name, p.global_shape, shape, layout, p.optimizer_shards, num_bytes, p.rule))
    return found
