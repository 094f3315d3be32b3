# SPDX-License-Identifier: Apache-2.0
"""Compile a deep network by compiling two with fewer layers, from which the graph at full depth follows.

The graph is equal to the compiled one (`partition.depth.unroll`). A network whose layers are not equal, or whose graphs at
the two depths differ by more than equal layers, is compiled at full depth, which takes longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.cells import DryRunCell
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.models.config import ModelConfig
from sporeloom.nn.dropout import NUM_PARTS, Dropout, drawn_constants
from sporeloom.parallel.step import Microbatch, TrainStep
from sporeloom.partition.depth.units import IrregularDepthError, Units
from sporeloom.partition.depth.unroll import NUM_UNITS, unrolled
from sporeloom.partition.mindir import CODES
from sporeloom.runtime.spmd.cell_key import cell_parts
from sporeloom.runtime.spmd.step_graphs import Compiled, compiled_or_cached
from sporeloom.strategy.config import Pipeline, Recompute, Strategy
from sporeloom.strategy.layout import Shape
from sporeloom.strategy.stages import recomputed_layers

MAX_SHARE = 0.7
"""Two networks are compiled in place of one if they have at most this share of its layers together."""
MAX_UNIT = 6
"""Largest number of layers after which a pattern of layers repeats."""
OF_DEPTH = frozenset({"site", "config"})
"""Attributes of Cells in a layer that depend on its number, or on the depth: dropouts' numbers, whose constants are derived
for each layer, and the model's configuration."""
_NUMBERED = re.compile(r"(?:(.*)\.)?layers\.(\d+)")


def compiler_of(
    full: DryRunCell, model: ModelConfig, strategy: Strategy, rebuild: Callable[[ModelConfig, Strategy], DryRunCell]
) -> Compiled:
    """The compiler for the parts of a model's step: at full depth, unless two networks with fewer layers do.

    Args:
        full: the step at full depth.
        rebuild: builds it for another depth, for a strategy without a pipeline.
    """
    layers = numbered_layers(full.cell)
    units = None if strategy.offload and strategy.offload.layers else layer_units(full, model, layers)
    if units is None:
        return compiled_or_cached
    counts = [units.num_layers(count) for count in NUM_UNITS]
    if sum(counts) > MAX_SHARE * len(layers):
        return compiled_or_cached
    try:
        small = [rebuild(*with_fewer_layers(full, model, strategy, len(layers), count)) for count in counts]
    except ConfigError:
        return compiled_or_cached
    if any(not is_same_but_for_depth(full, each) for each in small):
        return compiled_or_cached
    return FewerLayers(full, small, units, units.count(len(layers)))


def numbered_layers(cell: nn.Cell) -> dict[str, nn.Cell]:
    """The layers of the only list of layers in a network, by path; empty if there are none or several."""
    found = {path: each for path, each in cell.cells_and_names() if _NUMBERED.fullmatch(path)}
    return found if len({path.rpartition(".")[0] for path in found}) == 1 else {}


def layer_units(full: DryRunCell, model: ModelConfig, layers: dict[str, nn.Cell]) -> Units | None:
    """The shortest pattern of layers that repeats up to the last one; None: there is none."""
    described = [
        (description(cell, number), model.windows[number : number + 1], path in _recomputed(full))
        for number, (path, cell) in enumerate(layers.items())
    ]
    if not described or any(each is None for each, *_ in described):
        return None
    found = [repeating(described, size) for size in range(1, min(MAX_UNIT, len(described)) + 1)]
    return min(found, key=lambda units: sum(map(units.num_layers, NUM_UNITS)))


def description(cell: nn.Cell, number: int) -> tuple[str, ...] | None:
    """Everything in a layer that its graph depends on, without its number; None if that is not known."""
    parts = cell_parts(cell, OF_DEPTH)
    own = f"layers.{number}."
    return None if parts is None else tuple(part.replace(own, "layers.") for part in parts)


def repeating(described: Sequence[Hashable], size: int) -> Units:
    """The units of a sequence whose items repeat after `size` of them up to the end, with as few first ones as possible."""
    first = len(described) - size
    while first > 0 and described[first - 1] == described[first - 1 + size]:
        first -= 1
    return Units(first + (len(described) - first) % size, size)


def _recomputed(of: DryRunCell) -> set[str]:
    """Paths of recomputed layers within the step."""
    inside = "network." if isinstance(of.cell, TrainStep) else ""
    return {inside + path for path in of.report.recomputed}


def with_fewer_layers(
    full: DryRunCell, model: ModelConfig, strategy: Strategy, num_layers: int, count: int
) -> tuple[ModelConfig, Strategy]:
    """The model with the first `count` of its `num_layers` numbered layers, and a strategy without a pipeline, on as many
    devices, that recomputes what is left of the recomputed layers."""
    removed, recompute = num_layers - count, strategy.recompute
    if recompute:
        of_all = recomputed_layers(sum(map(len, full.report.layers_of_stages)), strategy)
        left = [layer for layer in of_all if layer < count]
        left += [layer - removed for layer in of_all if layer >= num_layers]  # layers after the numbered ones
        recompute = Recompute(kind=recompute.kind, layers=left)
    mesh = replace(strategy.mesh, pp=1, dp=strategy.mesh.dp * strategy.mesh.pp)
    fewer = replace(strategy, mesh=mesh, pipeline=Pipeline(), recompute=recompute)
    return model.with_layers(model.num_layers - removed), fewer


def is_same_but_for_depth(full: DryRunCell, small: DryRunCell) -> bool:
    """Whether the layers of a smaller network are the first ones of another, and recomputed alike."""
    layers, found = numbered_layers(full.cell), numbered_layers(small.cell)
    removed = set(layers) - set(found)
    if _recomputed(small) != _recomputed(full) - removed:
        return False
    return all(
        path in layers and description(cell, number) == description(layers[path], number)
        for number, (path, cell) in enumerate(found.items())
    )


@dataclass(frozen=True)
class FewerLayers:
    """Compiles parts of a step, or of a model."""

    full: DryRunCell
    small: Sequence[DryRunCell]
    """With NUM_UNITS layer units."""
    units: Units
    num_units: int

    def __call__(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
        """The graph of a Cell at full depth.

        Raises:
            ConfigError: it cannot be compiled.
        """
        cell.generate_scope()  # as its compilation would: scopes of Cells that a later one shares depend on the first
        is_update = isinstance(cell, TrainStep) and cell.takes_gradients
        names = [_names(of.cell, is_update, len(described)) for of in (*self.small, self.full)]
        given = dict(zip(names[-1], described, strict=True)) if is_update else {}
        models = []
        for of, known in zip(self.small, names, strict=False):
            inputs = [given[name] for name in known] if is_update else described
            models.append(compiled_or_cached(self._part(cell, of.cell), inputs))
        labels = [_Dropouts(of.cell).label for of in self.small]
        try:
            return unrolled(models, self.units, self.num_units, names, labels, _Dropouts(self.full.cell).written)
        except IrregularDepthError:
            return compiled_or_cached(cell, described)

    @staticmethod
    def _part(cell: nn.Cell, small: nn.Cell) -> nn.Cell:
        """The part of the smaller network that `cell` is of the full one."""
        if isinstance(cell, Microbatch):
            return Microbatch(small).set_train(small.training)
        if isinstance(cell, TrainStep):
            small.takes_gradients = cell.takes_gradients
        return small


def _names(cell: nn.Cell, is_update: bool, num_inputs: int) -> list[str]:
    """For each input of a part what it is: of an update the loss, then the gradient of a parameter."""
    return ["", *(parameter.name for parameter in cell.trained)] if is_update else [""] * num_inputs


class _Dropouts:
    """The constants of the dropouts of a network, named by path, part and size."""

    def __init__(self, cell: nn.Cell):
        self.sites = {path: of.site for path, of in cell.cells_and_names() if isinstance(of, Dropout) and of.active}
        self.by_first: dict[int, tuple[str, int]] = {}
        for path, site in self.sites.items():
            for part in range(NUM_PARTS):
                self.by_first[int(drawn_constants(site, part, 1)[0])] = path, part

    def label(self, tensor: mind_ir.TensorProto) -> str | None:
        """Name of a constant of a dropout; None: it is another constant."""
        if tensor.data_type != CODES["int32"] or not tensor.raw_data:
            return None
        values = np.frombuffer(tensor.raw_data, np.int32)
        path, part = self.by_first.get(int(values[0]), ("", 0))
        if not path or not np.array_equal(values, drawn_constants(self.sites[path], part, len(values))):
            return None
        return f"{path} {part} {len(values)}"

    def written(self, label: str) -> bytes:
        """Content of the constant of a name."""
        path, part, count = label.split(" ")
        return drawn_constants(self.sites[path], int(part), int(count)).tobytes()
