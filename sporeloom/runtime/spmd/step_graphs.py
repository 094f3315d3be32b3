# SPDX-License-Identifier: Apache-2.0
"""The graphs of pipeline stages for a Cell, sharded over the ranks of each stage; no process is involved.

A training step is two graphs of one device, which do not depend on the number of microbatches: the loss and gradients of one
microbatch, and the update. Without a pipeline there is one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.parallel.call import Call
from sporeloom.parallel.step import Microbatch, TrainStep
from sporeloom.partition.graph import Graph, Name, TensorType
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.sharded_graph import PartitionError
from sporeloom.partition.stages import PassGraph, StageGraphs, StagePass, cut_into_stages
from sporeloom.partition.updates import cut_updates
from sporeloom.runtime.spmd.cell_key import cell_key
from sporeloom.runtime.spmd.compilation_cache import cached_model
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.runtime.spmd.shard import Sharded, decide, reports_in, shard
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape
from sporeloom.strategy.schedule import splits_backward

Compiled = Callable[[nn.Cell, Sequence[tuple[Shape, Any]]], mind_ir.ModelProto]
"""Compiles a Cell for one device, for inputs of these shapes and NumPy dtypes."""


@dataclass(frozen=True)
class Cut:
    """A Cell's sharded graph, and the passes of each stage."""

    sharded: Sharded
    stages: StageGraphs


@dataclass(frozen=True)
class CutUpdate:
    """The update's sharded graph, and its graph for each stage."""

    sharded: Sharded
    graphs: list[Graph]


def compiled_or_cached(cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
    """The graph of one device: read from the compilation cache, or compiled.

    Raises:
        ConfigError: it cannot be compiled.
    """
    key = None if isinstance(cell, Call) else cell_key(cell)  # compiling a Call records what it returns
    if key is None:
        return compile_for_one_device(cell, described)
    inputs = [[list(shape), np.dtype(dtype).str] for shape, dtype in described]
    more = {"network": key, "one_device": str(ms.get_context("device_target")), "inputs": inputs}
    return cached_model(more, lambda: compile_for_one_device(cell, described))


def microbatch_of(
    step: TrainStep, described: Sequence[tuple[Shape, Any]], num_microbatches: int, strategy: Strategy
) -> tuple[Microbatch, list[tuple[Shape, Any]]]:
    """The part of a step that is repeated for each microbatch, and its inputs; `step` itself becomes the update.

    Raises:
        ConfigError: the batch does not divide into microbatches.
    """
    rows = described[0][0][0]
    if rows % num_microbatches:
        low = rows // num_microbatches * num_microbatches
        near = f"{low} or {low + num_microbatches}" if low else str(num_microbatches)
        raise ConfigError(
            f"{strategy.at('pipeline.num_microbatches')}: a batch of {rows} does not divide into {num_microbatches} "
            f"microbatches; take {near}"
        )
    microbatch = Microbatch(step).set_train(step.training)
    return microbatch, [((shape[0] // num_microbatches, *shape[1:]), dtype) for shape, dtype in described]


def cut_cell(model: mind_ir.ModelProto, cell: nn.Cell, strategy: Strategy, is_training: bool) -> Cut:
    """Shard one device's graph of a Cell, and partition it into the passes of stages.

    Args:
        is_training: whether it is a `Microbatch`, whose outputs after the first are gradients.

    Raises:
        ConfigError: it cannot be sharded or partitioned by the strategy.
    """
    trained = [parameter.name for parameter in cell.step.trained] if strategy.shards_gradients and is_training else ()
    decisions, has_stages = decide(cell, strategy.mesh), strategy.mesh.pp > 1
    sharded = shard(model, decisions, gathers_outputs=not is_training, scattered=trained, in_parts=has_stages)
    parts: dict[str, int] = {}
    for _, report in reports_in(cell):
        parts |= report.parts
    splits, sums_from = is_training and splits_backward(strategy.pipeline.order), 1 if is_training else None
    try:
        return Cut(
            sharded,
            cut_into_stages(sharded.result.graph, parts, splits, sums_from, strategy.stage_of_part, is_training),
        )
    except PartitionError as error:
        raise ConfigError(f"engine spmd: {error}") from None


def whole_cell(model: mind_ir.ModelProto, cell: nn.Cell, strategy: Strategy) -> Cut:
    """Shard one device's graph of a Cell that runs without stages and microbatches.

    Raises:
        ConfigError: it cannot be sharded by the strategy.
    """
    sharded = shard(model, decide(cell, strategy.mesh))
    graph = sharded.result.graph
    made = PassGraph(graph, list(range(len(graph.inputs))), [], list(graph.outputs))
    return Cut(sharded, StageGraphs({StagePass("forward", 0): made}, {}, {}, []))


def update_inputs(cut: Cut) -> tuple[list[TensorType], list[ValueLayout]]:
    """The inputs of the update (loss and gradients): their types on one device, and their layouts over the ranks of a
    stage."""
    types = types_of(cut.sharded.source)
    outputs = cut.sharded.source.outputs
    return [types[name] for name in outputs], [cut.sharded.result.layouts[name] for name in outputs]


def cut_update(compiled: Compiled, cut: Cut, step: TrainStep, strategy: Strategy) -> CutUpdate:
    """Compile and shard the update for the passes of `cut`, and partition it over stages.

    Raises:
        ConfigError: it cannot be compiled, sharded or partitioned by the strategy.
    """
    given, held = update_inputs(cut)
    model = compiled(step, [(type.shape, np.dtype(type.dtype)) for type in given])
    sharded = shard(model, decide(step, strategy.mesh), held)
    stages = {
        name.rpartition(":")[2]: frozenset(map(strategy.stage_of_part, parts))
        for name, parts in cut.stages.holders.items()
    }
    graph = sharded.result.graph
    holders = {}
    for name in graph.parameters:
        short = name.rpartition(":")[2]
        of = short if short in stages else short.partition(".")[2]
        if of in stages:
            holders[name] = stages[of]
    loss, *gradients = graph.inputs
    of_inputs = {loss: frozenset([strategy.stage_of_loss])}
    for position, (name, parameter) in enumerate(zip(gradients, step.trained, strict=True), 1):
        found = set(map(strategy.stage_of_part, cut.stages.results[position]))
        of_inputs[name] = stages.get(parameter.name, frozenset()) | found
    try:
        return CutUpdate(sharded, cut_updates(graph, strategy.mesh.pp, holders, of_inputs))
    except PartitionError as error:
        raise ConfigError(f"engine spmd: {error}") from None


def types_of(graph: Graph) -> dict[Name, TensorType]:
    """Types of all values."""
    types = {**graph.parameters, **graph.inputs}
    for node in graph.nodes:
        types |= {name: type for name, type in zip(node.outputs, node.types, strict=True) if type is not None}
    return types
