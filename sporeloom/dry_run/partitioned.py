# SPDX-License-Identifier: Apache-2.0
"""Partition a training step or an inference graph at full size, without its weights.

MindSpore's front end compiles the graph of one device, once for all ranks; `sporeloom.partition` shards it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import nn

from sporeloom.dry_run.cells import DryRunCell, custom_cell, model_cell
from sporeloom.dry_run.fewer_layers import compiler_of
from sporeloom.mindspore_compat.device import pin_cpu
from sporeloom.models.config import ModelConfig
from sporeloom.parallel.report import Report
from sporeloom.parallel.step import TrainStep
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask
from sporeloom.runtime.environment import prepare_environment
from sporeloom.runtime.spmd.call_graphs import cut_call, num_microbatches_of
from sporeloom.runtime.spmd.step_graphs import (
    Compiled,
    Cut,
    CutUpdate,
    compiled_or_cached,
    cut_cell,
    cut_update,
    microbatch_of,
    whole_cell,
)
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape


@dataclass(frozen=True)
class Partitioned:
    """One device's graphs of a step, or of a forward pass, sharded and cut into stages."""

    strategy: Strategy
    report: Report
    cut: Cut
    update: CutUpdate | None
    """None: nothing is trained, or the graph of the passes contains the update."""
    num_passes: int
    """Number of times that the passes run in a step."""
    trained: Collection[str]
    """Names of the trained parameters."""
    seconds: float
    """Time that compiling and sharding took."""
    summed: Sequence[int] = ()
    """Positions of the results of the passes that are summed over microbatches: gradients, mostly."""


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
        accumulate: gradient accumulation steps without a pipeline.

    Raises:
        ConfigError: it cannot be partitioned.
    """
    begin()
    gc.disable()  # millions of small objects, none in cycles

    def build(model: ModelConfig, strategy: Strategy) -> DryRunCell:
        return model_cell(family, model, strategy, batch, inference, accumulate, task)

    built = build(model, strategy)
    compiled = compiler_of(built, model, strategy, build)
    return _partitioned(built, strategy, strategy.num_microbatches(accumulate), compiled)


def partition_custom(
    make: Callable[[], nn.Cell],
    strategy: Strategy,
    inputs: Sequence[tuple[Shape, Any]],
    compiled: Compiled | None = None,
) -> Partitioned:
    """Partition a step of AdamW of a custom network, which returns its loss, as `auto_parallel` runs it.

    Args:
        make: makes the network.
        inputs: global shape and NumPy dtype of each.
        compiled: compiles the step for one device, in a process that is set up; without, `begin` sets it up.

    Raises:
        ConfigError: it cannot be partitioned.
    """
    if compiled is None:
        begin()
        compiled = compiled_or_cached
    start, built = time.perf_counter(), custom_cell(make, strategy, inputs)
    if strategy.mesh.pp == 1:
        return _partitioned(built, strategy, 1, compiled)
    cell, report, inputs = built
    model = compiled(cell, inputs)
    cut = cut_call(model, cell, strategy, num_microbatches_of(model, cell, inputs, strategy))
    sums = [position for position, name in enumerate(cut.divided.main.outputs) if name in cut.summed]
    update = CutUpdate(cut.sharded, cut.after)
    seconds = time.perf_counter() - start
    passes = Cut(cut.sharded, cut.stages)
    return Partitioned(strategy, report, passes, update, cut.num_microbatches, built.trained, seconds, sums)


def partition_forward(net: nn.Cell, strategy: Strategy, inputs: Sequence[tuple[Shape, Any]]) -> Partitioned:
    """Partition the forward pass of a parallelized network, after `begin`.

    Args:
        inputs: global shape and NumPy dtype of each.

    Raises:
        ConfigError: it cannot be partitioned.
    """
    return _partitioned(DryRunCell(net, net.parallel_report, inputs), strategy, 1)


def begin() -> None:
    """Set up this process for graphs of any devices."""
    prepare_environment()
    pin_cpu()  # on machines with devices, too: the graph does not depend on them


def _partitioned(
    built: DryRunCell, strategy: Strategy, num_passes: int, compiled: Compiled = compiled_or_cached
) -> Partitioned:
    start, (cell, report, inputs) = time.perf_counter(), built

    trained = built.trained
    if strategy.mesh.pp == 1 and (num_passes == 1 or not trained):  # runs as one graph
        cut = whole_cell(compiled(cell, inputs), cell, strategy)
        return Partitioned(strategy, report, cut, None, 1, trained, time.perf_counter() - start)
    if not isinstance(cell, TrainStep):
        cut = cut_cell(compiled(cell, inputs), cell, strategy, is_training=False)
        return Partitioned(strategy, report, cut, None, 1, trained, time.perf_counter() - start)
    microbatch, inputs = microbatch_of(cell, inputs, num_passes, strategy)
    cut = cut_cell(compiled(microbatch, inputs), microbatch, strategy, is_training=True)
    update, sums = cut_update(compiled, cut, cell, strategy), range(1, 1 + len(trained))
    return Partitioned(strategy, report, cut, update, num_passes, trained, time.perf_counter() - start, sums)
