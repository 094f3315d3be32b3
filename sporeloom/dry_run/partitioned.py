# SPDX-License-Identifier: Apache-2.0
"""Partition the real training step or inference graph at full size, without its weights, and count what ranks hold and do.

MindSpore compiles the graph of one device, once for all ranks; `sporeloom.partition` shards it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import nn
from mindspore.nn.utils import no_init_parameters

from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.parallel.cells import ShardBatch, average_over_all_rows, prepare_to_shard
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.report import Report
from sporeloom.parallel.step import TrainStep
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask
from sporeloom.private_names import mind_ir
from sporeloom.runtime.cpu.compilation_cache import cached_model
from sporeloom.runtime.cpu.spmd import compile_for_one_device
from sporeloom.runtime.cpu.step_graphs import Compiled, Cut, CutUpdate, cut_cell, cut_update, microbatch_of
from sporeloom.runtime.cpu.target import pin_cpu
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape
from sporeloom.tasks.example import task_network
from sporeloom.train.optim import AdamW


@dataclass(frozen=True)
class Partitioned:
    """One device's graphs of a step, or of a forward pass, sharded and cut into stages."""

    strategy: Strategy
    report: Report
    cut: Cut
    update: CutUpdate | None
    """None: nothing is trained."""
    times: int
    """How often the passes run in a step."""
    trained: Collection[str]
    """Names of parameters."""
    seconds: float
    """That compiling and sharding took."""


def partition_model(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    batch: tuple[int, int],
    inference: bool = False,
    accumulate: int = 1,
    task: TrainedTask = PLAIN_TEXT,
) -> Partitioned:
    """Partition a model's training step, or its forward pass.

    Args:
        batch: sequences of a step over all ranks, and their tokens.
        accumulate: parts that the batch is split into without a pipeline.

    Raises:
        ConfigError: it cannot be partitioned.
    """
    _begin()
    gc.disable()  # millions of small objects, none in cycles
    inputs: list[tuple[Shape, Any]] = [(batch, np.int32)] * 2
    key = {"dry_run": family, "model": model.to_dict(), "task": task.about(), "inference": inference}
    with no_init_parameters():
        net = family_module(family, "model").Model(model) if inference else task_network(family, model, task)
        report = parallelize(net, strategy, whole=not inference)
        if inference:
            cell: nn.Cell = net.set_train(False)
        else:
            inputs += [(batch, np.int32), *[(batch, np.float32)] * (1 + net.loss.num_inputs)]
            inputs += [(batch, np.int32), (batch, np.float32)] * getattr(net, "num_mtp", 0)
            inputs += [(batch, np.int32)] if model.dropout_rate else []
            optimizer = AdamW(net.trainable_params(), on_host=strategy.optimizer_on_host)
            scaled = model.compute_dtype == "float16"
            cell = TrainStep(net, optimizer, report, 0, max_grad_norm=1.0, accumulate=accumulate, loss_scale=scaled)
            cell.set_train()
    rules = strategy.rules
    marks = repr((strategy.recompute, strategy.offload, rules.layers, rules.selective))
    cell.graph_key = {**key, "marks": marks}
    return _partitioned(cell, strategy, report, inputs, strategy.num_microbatches(accumulate), _cached)


def partition_own(make: Callable[[], nn.Cell], strategy: Strategy, inputs: Sequence[tuple[Shape, Any]]) -> Partitioned:
    """Partition a step of AdamW of a user's network, which returns its loss.

    Args:
        make: makes the network.
        inputs: global shape and NumPy dtype of each.

    Raises:
        ConfigError: it cannot be partitioned.
    """
    _begin()
    with no_init_parameters():
        net = make()
        prepare_to_shard(net)
        for _, cell in net.cells_and_names():
            average_over_all_rows(cell)
        report = parallelize(net, strategy)
        optimizer, around = AdamW(net.trainable_params()), wrap(ShardBatch(net, strategy.mesh), strategy)
        scale = 1 / strategy.num_microbatches()
        step = TrainStep(around, optimizer, report, 0, max_grad_norm=1.0, scale=scale).set_train()
    return _partitioned(step, strategy, report, inputs, strategy.num_microbatches(), compile_for_one_device)


def _begin() -> None:
    prepare_environment()
    pin_cpu()  # also where there are devices: what is compiled does not depend on them


def _cached(cell: nn.Cell, inputs: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
    described = [[list(shape), np.dtype(dtype).str] for shape, dtype in inputs]
    return cached_model({**cell.graph_key, "inputs": described}, lambda: compile_for_one_device(cell, inputs))


def _partitioned(
    cell: nn.Cell,
    strategy: Strategy,
    report: Report,
    inputs: Sequence[tuple[Shape, Any]],
    times: int,
    compiled: Compiled,
) -> Partitioned:
    start = time.perf_counter()
    if not isinstance(cell, TrainStep):
        cut = cut_cell(compiled(cell, inputs), cell, strategy, is_training=False)
        return Partitioned(strategy, report, cut, None, 1, (), time.perf_counter() - start)
    trained = {parameter.name for parameter in cell.optimizer.parameters}
    microbatch, inputs = microbatch_of(cell, inputs, times, strategy)
    cut = cut_cell(compiled(microbatch, inputs), microbatch, strategy, is_training=True)
    update = cut_update(compiled, cut, cell, strategy)
    return Partitioned(strategy, report, cut, update, times, trained, time.perf_counter() - start)
