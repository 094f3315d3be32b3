# SPDX-License-Identifier: Apache-2.0
"""Layouts of parameters in compiled graphs: compared with those that `parallelize` predicted, or read where there is no
rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.parallel.parts import held_part
from sporeloom.parallel.report import DERIVED, Report
from sporeloom.strategy.layout import Dim, Layout, Shape, show
from sporeloom.strategy.mesh import Mesh

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class ParameterLayout:
    """The compiler's layout of one parameter."""

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

    def operator_slices(self, global_shape: Shape, rank: int) -> Slices:
        """Slices of the full tensor that the operators of `rank` use."""
        place = np.unravel_index(rank % int(np.prod(self.device_matrix)), self.device_matrix)
        result = []
        for size, cut, axis in zip(global_shape, self.shards, self.tensor_map, strict=True):
            start = 0 if axis < 0 else int(place[-1 - axis]) * (size // cut)
            result.append(slice(start, start + size // cut))
        return tuple(result)

    def slices(self, global_shape: Shape, rank: int, groups: Mapping[str, Sequence[int]]) -> Slices:
        """Slices of the full tensor that `rank` stores: its operators' shard, or with optimizer parallelism a shard of
        that."""
        result = list(self.operator_slices(global_shape, rank))
        if self.optimizer_group and result:
            ranks = groups[self.optimizer_group]
            start, length = result[0].start, (result[0].stop - result[0].start) // len(ranks)
            start += ranks.index(rank) * length
            result[0] = slice(start, start + length)
        return tuple(result)

    def by_name(self, mesh: Mesh) -> Layout | None:
        """Mesh axes that shard each dim; None if they are not a product of mesh axes."""
        named: list[Dim] = []
        for cut, axis in zip(self.shards, self.tensor_map, strict=True):
            if cut == 1:
                named.append(())
                continue
            ranks = range(math.prod(self.device_matrix))
            places = [int(np.unravel_index(rank, self.device_matrix)[-1 - axis]) for rank in ranks]
            dim = next((axes for axes in _products(mesh, cut) if places == _places(mesh, axes, len(places))), None)
            if dim is None:
                return None
            named.append(dim)
        return tuple(named)


def read_layouts(raw_layouts: Mapping[str, Any]) -> dict[str, ParameterLayout]:
    """Read MindSpore's parameter layouts, from its executor or from a Cell's `parameter_layout_dict`."""
    return {
        name: ParameterLayout(tuple(raw[0]), tuple(raw[1]), tuple(raw[2]), raw[5]) for name, raw in raw_layouts.items()
    }


def learn_layouts(
    report: Report, layouts: Mapping[str, ParameterLayout], groups: Mapping[str, Sequence[int]], rank: int, source: str
) -> bool:
    """Compare the layout that `parallelize` predicted for each parameter with the compiler's. The gradient norm and
    checkpoints depend on the prediction. For parameters without a rule the report takes over the layout that MindSpore
    derived.

    Returns whether the report has changed. `source`: name of the strategy in messages.

    Raises:
        ConfigError: they differ.
    """
    mesh, problems, changed = report.mesh, [], False
    for name, layout in layouts.items():
        said = report.by_name.get(name)
        if said is None:
            continue
        theirs = layout.slices(said.global_shape, rank, groups)
        if not said.rule and (named := layout.by_name(mesh)) and named != said.layout:
            report.derive(name, named, len(groups[layout.optimizer_group]) if layout.optimizer_group else 1)
            said, changed = report.by_name[name], True
        ours = held_part(said, mesh, rank)
        if ours != theirs:
            problems.append(
                f"{said.rule or source}: {name} {said.global_shape}: by its rule rank {rank} holds {_bounds(ours)}, layout "
                f"{show(said.layout)}; MindSpore compiled {_bounds(theirs)}, device matrix {layout.device_matrix}, tensor "
                f"map {layout.tensor_map}; give it to its operator as self.OPERATOR(..., self.PARAMETER), unchanged, so "
                "that the rule is its own"
            )
    if problems:
        raise ConfigError(problems[:8])
    return changed


def learn_from(
    cell: nn.Cell, layouts: Mapping[str, ParameterLayout], groups: Mapping[str, Sequence[int]], rank: int, source: str
) -> bool:
    """Apply `learn_layouts` to every parallelized network in `cell`. Returns whether a report has changed."""
    changed = [learn_layouts(report, layouts, groups, rank, source) for report in _reports(cell)]
    return any(changed)


def derived_in(cell: nn.Cell) -> list[str]:
    """Names of the parameters in `cell` whose layout was derived without a rule."""
    return [parameter.name for report in _reports(cell) for parameter in report.parameters if parameter.rule == DERIVED]


def parallelized(cell: nn.Cell) -> set[str]:
    """Names of the parameters of the parallelized networks in `cell`."""
    return {parameter.name for report in _reports(cell) for parameter in report.parameters}


def _reports(cell: nn.Cell) -> list[Report]:
    """The reports of the parallelized networks in `cell`, each once."""
    said = (getattr(each, "parallel_report", None) for _, each in cell.cells_and_names())
    return list({id(report): report for report in said if isinstance(report, Report)}.values())


def _products(mesh: Mesh, cut: int) -> list[Dim]:
    """Sequences of mesh axes whose degrees multiply to `cut`, shortest first."""
    axes = mesh.sharding_axes
    found = (chosen for n in range(len(axes) + 1) for chosen in itertools.permutations(axes, n))
    return [chosen for chosen in found if math.prod(axes[axis] for axis in chosen) == cut]


def _places(mesh: Mesh, axes: Dim, num_ranks: int) -> list[int]:
    """For each rank of a stage, the index of its shard of a dim that `axes` shard."""
    places = []
    for rank in range(num_ranks):
        place = 0
        for axis in axes:
            place = place * mesh.degree(axis) + mesh.coordinate(rank, axis)
        places.append(place)
    return places


def _bounds(slices: Slices) -> str:
    return "[" + ", ".join(f"{s.start}:{s.stop}" for s in slices) + "]"
