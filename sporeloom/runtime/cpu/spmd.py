# SPDX-License-Identifier: Apache-2.0
"""Partition a Cell for one rank from the graph that MindSpore compiles for one device, by `sporeloom.partition`.

No parallel mode of MindSpore is involved, nor a virtual device: the same graph serves all ranks and meshes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from sporeloom.parallel.sharding import operators
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.mindir import read_graph, write_rank
from sporeloom.partition.propagate import ShardedGraph, shard_graph
from sporeloom.private_names import cell_graph_executor, mind_ir
from sporeloom.runtime.compiler import faster_compilation
from sporeloom.runtime.cpu.partition import PartitionedGraph
from sporeloom.runtime.layouts import Slices
from sporeloom.strategy.layout import Layout, Shape
from sporeloom.strategy.mesh import Mesh

_phases = itertools.count()


@dataclass(frozen=True)
class GridLayout:
    """How the ranks hold one parameter; as `ParameterLayout` to those who read values by it."""

    layout: ValueLayout
    grid: DeviceGrid
    local_shape: Shape
    optimizer_group: str = ""

    def slices(self, global_shape: Shape, rank: int, groups: Mapping[str, Sequence[int]]) -> Slices:
        """The part of the whole parameter that `rank` holds."""
        result = []
        for size, axes in zip(global_shape, self.layout.dims, strict=True):
            length = size // self.grid.degree(axes)
            start = self.grid.index(rank, axes) * length
            result.append(slice(start, start + length))
        return tuple(result)


def device_grid(mesh: Mesh) -> DeviceGrid:
    """The ranks of a mesh of one stage."""
    return DeviceGrid({axis: mesh.degree(axis) for axis in mesh.order if axis != "pp" and mesh.degree(axis) > 1})


def compile_for_one_device(cell: nn.Cell, inputs: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
    """The graph of `cell`, every pass of MindSpore's front end done. Its operators know their paths.

    Args:
        inputs: shape and NumPy dtype of each input.
    """
    for operator in operators(cell):
        operator.primitive.add_prim_attr("path", operator.path)
    tensors = [Tensor(np.zeros(shape, dtype)) for shape, dtype in inputs]
    executor = cell_graph_executor._graph_executor
    with faster_compilation():
        phase, _ = cell_graph_executor.compile(
            cell, *tensors, phase=f"export.mindir.one_device.{next(_phases)}", do_convert=False
        )
        return mind_ir.ModelProto.FromString(executor.get_func_graph_proto(phase, "mind_ir", False))


def partition_for_rank(
    model: mind_ir.ModelProto, grid: DeviceGrid, parameters: Mapping[str, Layout], inputs: Sequence[Layout], rank: int
) -> tuple[PartitionedGraph, ShardedGraph]:
    """The part of one device's graph that `rank` computes.

    Args:
        parameters: layouts by name; of those that are not named every rank holds all.
        inputs: layouts by which the inputs, which every rank is given whole, are sharded at once.
    """
    start = time.perf_counter()
    graph = read_graph(model)
    names = {full: full.rpartition(":")[2] for full in graph.parameters}
    wanted = {full: parameters[name] for full, name in names.items() if name in parameters}
    sharded = shard_graph(graph, grid, wanted, dict(zip(graph.inputs, inputs, strict=True)))
    written, groups = write_rank(sharded, model, grid, rank)
    layouts: dict[str, Any] = {
        name: GridLayout(ValueLayout(wanted.get(full, ((),) * len(type.shape))), grid, local.shape)
        for (full, name), type, local in zip(
            names.items(), graph.parameters.values(), sharded.graph.parameters.values(), strict=True
        )
    }
    return PartitionedGraph(written, layouts, groups, rank, time.perf_counter() - start), sharded
