# SPDX-License-Identifier: Apache-2.0
"""Layouts of parameters in the files with which MindSpore transforms checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import nn

from sporeloom.mindspore_compat.names import node_strategy
from sporeloom.parallel.report import ParameterReport
from sporeloom.partition.grid import MICROBATCHES, STAGES, DeviceGrid
from sporeloom.runtime.spmd.shard import decide
from sporeloom.strategy.layout import Layout
from sporeloom.strategy.mesh import Mesh


def layout_file(parameters: Sequence[ParameterReport], net: nn.Cell, mesh: Mesh, stage: int) -> bytes:
    """The layouts of a stage's parameters of a parallelized network, in MindSpore's format (`strategy_ckpt_config`)."""
    decisions = decide(net, mesh)
    written = node_strategy.ParallelStrategyMap(current_stage=1)
    item = written.parallel_strategy_item.add(node_name=f"stage_{stage}")  # MindSpore reads the stage from the first
    item.parallel_strategys.stage = stage
    for parameter in parameters:
        layout = decisions.parameters.get(parameter.name) or ((),) * len(parameter.global_shape)
        said = written.parallel_layout_item.add(param_name=parameter.name).parallel_layouts
        _describe(said, layout, parameter.optimizer_shards, decisions.grid)
    content: bytes = written.SerializeToString()
    return content


def _describe(said: Any, layout: Layout, optimizer_shards: int, grid: DeviceGrid) -> None:
    """Describe a layout, in which the axes of optimizer parallelism are the last ones of dim 0, in MindSpore's terms.

    The device matrix has the degrees of the axes, outer to inner. The tensor map has for each dim the axes that shard it,
    counted from the innermost one, and -1 for none. For optimizer parallelism MindSpore takes as many of the other axes as
    it needs, from the innermost one; the step is the distance of neighbouring ranks.
    """
    axes = [axis for axis in grid.degrees if axis not in (STAGES, MICROBATCHES)]
    numbers = {axis: len(axes) - 1 - position for position, axis in enumerate(axes)}
    further: list[str] = []
    while grid.degree(further) < optimizer_shards:
        further.insert(0, layout[0][-1 - len(further)])
    dims = [[numbers[axis] for axis in dim if axis not in further] or [-1] for dim in layout]
    if all(len(dim) == 1 for dim in dims):  # one list of numbers; otherwise one list for each dim
        dims = [[number for dim in dims for number in dim]]
    said.dev_matrix.add().dim.extend([grid.degrees[axis] for axis in axes] or [1])
    for dim in dims:
        said.tensor_map.add().dim.extend(dim)
    said.param_split_shape.add()
    said.indices_offset.add()
    said.field, said.opt_weight_shard_size, said.opt_weight_shard_step = 0, 0, 0
    if further:
        said.opt_weight_shard_size = optimizer_shards
        said.opt_weight_shard_step = grid.degree(axes[axes.index(further[-1]) + 1 :])
