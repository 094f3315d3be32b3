# SPDX-License-Identifier: Apache-2.0
"""Layouts of parameters in graphs that MindSpore shards, compared with those that `parallelize` predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.parallel.parts import held_part
from sporeloom.parallel.report import Report
from sporeloom.strategy.layout import Shape, show
from sporeloom.strategy.tensor_slice import TensorSlice


@dataclass(frozen=True)
class CompiledLayout:
    """MindSpore's layout of one parameter, a `ParameterLayout`."""

    device_matrix: Shape
    tensor_map: Shape
    """For each dim its axis of `device_matrix`, counted from the end; -1: unsharded."""
    local_shape: Shape
    optimizer_group: str
    """Group over which optimizer parallelism (ZeRO) shards dim 0 further; empty if it does not."""

    @property
    def shards(self) -> Shape:
        """Number of shards of each dim in the operator's layout."""
        return tuple(1 if axis < 0 else self.device_matrix[-1 - axis] for axis in self.tensor_map)

    def operator_slice(self, global_shape: Shape, rank: int) -> TensorSlice:
        """The part of the full tensor that the operators of `rank` use."""
        coordinates = np.unravel_index(rank % int(np.prod(self.device_matrix)), self.device_matrix)
        indices = [0 if axis < 0 else int(coordinates[-1 - axis]) for axis in self.tensor_map]
        return TensorSlice.shard(global_shape, indices, self.shards)

    def stored_slice(self, global_shape: Shape, rank: int, groups: Mapping[str, Sequence[int]]) -> TensorSlice:
        """The part of the full tensor that `rank` stores: its operators' shard, or with optimizer parallelism a shard
        of that."""
        part = self.operator_slice(global_shape, rank)
        if not self.optimizer_group or not global_shape:
            return part
        ranks = groups[self.optimizer_group]
        return part.rows(ranks.index(rank), len(ranks))


def read_layouts(raw_layouts: Mapping[str, Any]) -> dict[str, CompiledLayout]:
    """Read MindSpore's parameter layouts, from its executor or from a Cell's `parameter_layout_dict`."""
    return {
        name: CompiledLayout(tuple(raw[0]), tuple(raw[1]), tuple(raw[2]), raw[5]) for name, raw in raw_layouts.items()
    }


def check_layouts(
    cell: nn.Cell, layouts: Mapping[str, CompiledLayout], groups: Mapping[str, Sequence[int]], rank: int, source: str
) -> None:
    """Compare the layouts that `parallelize` predicted for the networks in `cell` with the compiler's. The gradient norm and
    checkpoints depend on the prediction. `source`: name of the strategy in messages.

    Raises:
        ConfigError: they differ.
    """
    reports = (getattr(each, "parallel_report", None) for _, each in cell.cells_and_names())
    problems = [
        problem
        for report in {id(report): report for report in reports if isinstance(report, Report)}.values()
        for name, layout in layouts.items()
        for problem in _difference(report, name, layout, groups, rank, source)
    ]
    if problems:
        raise ConfigError(problems[:8])


def _difference(
    report: Report,
    name: str,
    layout: CompiledLayout,
    groups: Mapping[str, Sequence[int]],
    rank: int,
    source: str,
) -> Iterator[str]:
    said = report.by_name.get(name)
    if said is None:
        return
    ours, theirs = held_part(said, report.mesh, rank), layout.stored_slice(said.global_shape, rank, groups)
    if ours != theirs:
        yield (
            f"{said.rule or source}: {name} {said.global_shape}: by its rule rank {rank} holds {ours}, layout "
            f"{show(said.layout)}; MindSpore compiled {theirs}, device matrix {layout.device_matrix}, tensor "
            f"map {layout.tensor_map}; give it to its operator as self.OPERATOR(..., self.PARAMETER), unchanged, so "
            "that the rule is its own"
        )
