# SPDX-License-Identifier: Apache-2.0
"""Shards the graph of one device by the reports of the networks in it: the same graph serves all ranks and meshes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mindspore import nn

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.models.paths import path_matches
from sporeloom.parallel.call import Call
from sporeloom.parallel.report import Report
from sporeloom.partition.axis_parts import PartedAxes, UndividedAxisError, sharded_further
from sporeloom.partition.graph import Graph
from sporeloom.partition.grid import MICROBATCHES, STAGES, DeviceGrid
from sporeloom.partition.hints import computed_values
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.mindir import UnreadableGraphError, read_graph
from sporeloom.partition.operation import Pin
from sporeloom.partition.paths import functional_paths, with_paths
from sporeloom.partition.propagate import shard_graph
from sporeloom.partition.rank_mindir import write_rank
from sporeloom.partition.sharded_graph import MixedRowsError, PartitionError, ShardedGraph
from sporeloom.runtime.backend import ParameterLayout
from sporeloom.runtime.spmd.rank_graph import RankGraph
from sporeloom.runtime.spmd.value_shards import ValueShard, shards_of_values
from sporeloom.strategy.axes import ROWS
from sporeloom.strategy.layout import Layout, Shape
from sporeloom.strategy.mesh import Mesh, part_of_axis
from sporeloom.strategy.tensor_slice import TensorSlice, rank_slice


@dataclass(frozen=True)
class GridLayout:
    """The layout of one parameter, with the interface of `ParameterLayout`."""

    layout: ValueLayout
    grid: DeviceGrid
    local_shape: Shape
    optimizer_group: str = ""

    def stored_slice(self, global_shape: Shape, rank: int, groups: Mapping[str, Sequence[int]]) -> TensorSlice:
        """The part of the full parameter that `rank` stores."""
        return self.operator_slice(global_shape, rank)

    def operator_slice(self, global_shape: Shape, rank: int) -> TensorSlice:
        """The part that operators use: the stored one, because the layout includes sharding over replicas (ZeRO)."""
        grid = self.grid
        return rank_slice(global_shape, self.layout.dims, grid.degrees.__getitem__, partial(grid.coordinate, rank))


@dataclass(frozen=True)
class Decisions:
    """The decisions of a strategy about a Cell, from which its sharding is derived."""

    grid: DeviceGrid
    parameters: dict[str, Layout] = field(default_factory=dict)
    """Name -> layout in the grid's axes; the others are replicated."""
    pinned: dict[str, Pin] = field(default_factory=dict)
    """Path of an operator within the Cell -> its rule."""
    functional: Sequence[tuple[str, bool, Pin]] = ()
    """Rules for operators that are not attributes of a Cell: (pattern of the path, whether it may match nothing, layouts).
    The last matching rule applies."""
    inputs: Sequence[Layout] | None = None
    """Layouts of the inputs; None: inputs with the batch in dim 0 are sharded over dp. The batch size is the size of
    the first dim 0 that is divisible."""
    takes_batch: bool = True
    reshards: bool = False
    """Whether weights are gathered anew for the forward and the backward pass."""


def decide(
    cell: nn.Cell, mesh: Mesh, num_microbatches: int = 1, shards_accumulated_gradients: bool = False
) -> Decisions:
    """Derive decisions from the reports of the parallelized networks in `cell`.

    Args:
        num_microbatches: number of microbatches over which the batch is sharded as well (see `partition/microbatches.py`).
        shards_accumulated_gradients: whether the gradients of each of these are reduce-scattered.

    Raises:
        ConfigError: rules or optimizer parallelism divide an axis incompatibly.
    """
    degrees, layouts, pinned = mesh.sharding_axes, dict[str, Layout](), dict[str, Pin]()
    functional: list[tuple[str, bool, Pin]] = []
    reports = list(reports_in(cell))
    try:
        for path, report in reports:
            for said in report.parameters:
                shards, skips = said.optimizer_shards, report.is_spmd  # MindSpore skips none
                dims = sharded_further(said.layout, degrees, shards, skips) if said.layout else ()
                layouts[said.name] = dims
            for operator, rule in report.rules.owners.items():
                pinned[f"{path}.{operator}" if path else operator] = Pin(
                    rule.inputs, rule.outputs, rule.local, rule.source
                )
            for rule in report.functional:
                pin = Pin(rule.inputs, rule.outputs, rule.local, rule.source)
                functional.append((rule.pattern, rule.optional, pin))
        pins = [*pinned.values(), *(pin for *_, pin in functional)]
        named = [*layouts.values(), *(each for pin in pins for each in (*pin.inputs, *(pin.outputs or ())))]
        axes = PartedAxes({MICROBATCHES: num_microbatches, STAGES: mesh.pp, **degrees}, named)
    except UndividedAxisError as error:
        raise ConfigError(f"{mesh}: {error}") from None

    axes.grid.scatters_first = shards_accumulated_gradients

    def resolved(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return tuple(map(axes.layout, layouts))

    def resolved_pin(pin: Pin) -> Pin:
        return Pin(resolved(pin.inputs), None if pin.outputs is None else resolved(pin.outputs), pin.local, pin.source)

    return Decisions(
        axes.grid,
        {name: axes.layout(layout) for name, layout in layouts.items()},
        {path: resolved_pin(pin) for path, pin in pinned.items()},
        [(pattern, optional, resolved_pin(pin)) for pattern, optional, pin in functional],
        takes_batch=not isinstance(cell, Call) or cell.takes_batch,
        reshards=any(report.reshards for _, report in reports),
    )


def reports_in(cell: nn.Cell) -> Iterator[tuple[str, Report]]:
    """Path and report of each parallelized network in `cell`."""
    for path, each in cell.cells_and_names():
        if isinstance(report := getattr(each, "parallel_report", None), Report):
            yield path, report


def layouts_of(shapes: Mapping[str, Shape], decided: Mapping[str, Layout]) -> dict[str, Layout]:
    """Layouts of parameters, and of optimizer states `prefix.NAME`, which follow parameter NAME if they have its shape."""
    layouts = {}
    for name, shape in shapes.items():
        of = name if name in decided else name.partition(".")[2]
        if of in decided and (of == name or shapes.get(of) == shape):
            layouts[name] = decided[of]
    return layouts


def _by_row(graph: Graph, grid: DeviceGrid, takes_batch: bool) -> list[Layout]:
    of_batch = (MICROBATCHES, *(axis.name for axis in ROWS if axis.shards == "batch"))
    batch = tuple(axis for axis in grid.degrees if part_of_axis(axis)[0] in of_batch)
    shapes = [type.shape for type in graph.inputs.values() if type.shape and takes_batch]
    rows = next((shape[0] for shape in shapes if shape[0] % grid.degree(batch) == 0), 0)
    return [
        tuple(batch if dim == 0 and size == rows else () for dim, size in enumerate(type.shape))
        for type in graph.inputs.values()
    ]


@dataclass(frozen=True)
class Sharded:
    """One device's graph, sharded over the ranks of a stage."""

    result: ShardedGraph
    source: Graph
    model: mind_ir.ModelProto
    layouts: dict[str, ParameterLayout]
    """Layouts of all parameters."""
    grid: DeviceGrid

    def of_rank(self, rank: int, graph: Graph | None = None, tells_values_of: str | None = None) -> RankGraph:
        """The graph that `rank` executes: all of it, or `graph`, a part of it.

        Args:
            tells_values_of: name of the part, if `RankGraph.values` are to be set.
        """
        sharded = self.result if graph is None else replace(self.result, graph=graph)
        written, groups, names = write_rank(sharded, self.model, self.grid, rank)
        values: Mapping[str, ValueShard] = {}
        if tells_values_of is not None:
            is_update = tells_values_of == "update"
            values = shards_of_values(self.source, self.result.made, names, self.grid, rank, is_update)
        return RankGraph(written, self.layouts, groups, rank, values)


def _with_functional_rules(graph: Graph, decisions: Decisions, has_batch: bool) -> tuple[Graph, dict[str, Pin]]:
    """Give the operators that rules name by their kind paths, and return all pins.

    Raises:
        ConfigError: a rule matches none of the operators of a graph of the batch.
    """
    if not decisions.functional:
        return graph, decisions.pinned
    paths, chosen, problems = functional_paths(graph), dict[str, Pin](), []
    for pattern, optional, pin in decisions.functional:
        matching = [path for path in paths if path_matches(pattern, path)]
        chosen |= dict.fromkeys(matching, pin)
        if not matching and not optional and decisions.takes_batch and has_batch:
            parts = len(pattern.split("."))
            near = did_you_mean(pattern, {".".join(path.split(".")[-parts:]) for path in paths})
            problems.append(
                f"{pin.source}: {pattern} matches no operator of the graph{near}; `sporeloom rules FILE --inputs ...` lists "
                "those of a network"
            )
    if problems:
        raise ConfigError(problems)
    return with_paths(graph, {paths[path]: path for path in chosen}), {**decisions.pinned, **chosen}


def shard(
    model: mind_ir.ModelProto,
    decisions: Decisions,
    held: Sequence[ValueLayout] | None = None,
    gathers_outputs: bool = True,
    scattered: Sequence[str] = (),
    in_parts: bool = False,
) -> Sharded:
    """Shard one device's graph. Ranks receive full inputs, or inputs in the layouts `held`.

    Args:
        scattered: names of parameters, of which the outputs after the first are gradients, to be sharded like them.
        in_parts: whether the summands of these are sharded so, because they are of several stages.

    Raises:
        ConfigError: it cannot be sharded by the strategy.
        MixedRowsError: it cannot be divided into microbatches.
    """
    grid = decisions.grid
    try:
        graph, pinned = _with_functional_rules(read_graph(model), decisions, held is None)
        names = {full: full.rpartition(":")[2] for full in graph.parameters}
        decided = layouts_of({name: graph.parameters[full].shape for full, name in names.items()}, decisions.parameters)
        wanted = {full: decided[name] for full, name in names.items() if name in decided}
        parts = dict(zip(graph.inputs, held, strict=True)) if held is not None else {}
        of_inputs = decisions.inputs or _by_row(graph, grid, decisions.takes_batch and held is None)
        inputs = dict(zip(graph.inputs, of_inputs, strict=True))
        gradients = zip(graph.outputs[1:], scattered, strict=False)
        like = {output: decided[name] for output, name in gradients if name in decided}
        sharded = shard_graph(
            graph,
            grid,
            wanted,
            inputs,
            pinned,
            parts,
            gathers_outputs,
            reshards=decisions.reshards,
            scattered=computed_values(graph, like, are_summed=in_parts),
        )
    except MixedRowsError:
        raise
    except (UnreadableGraphError, PartitionError) as error:
        raise ConfigError(f"engine spmd: {error}") from None
    layouts: dict[str, Any] = {
        name: GridLayout(ValueLayout(wanted.get(full, ((),) * len(type.shape))), grid, local.shape)
        for (full, name), type, local in zip(
            names.items(), graph.parameters.values(), sharded.graph.parameters.values(), strict=True
        )
    }
    return Sharded(sharded, graph, model, layouts, grid)


def partition_for_rank(model: mind_ir.ModelProto, decisions: Decisions, rank: int) -> tuple[RankGraph, ShardedGraph]:
    """The sharded graph of one device for `rank`, which receives full inputs.

    Raises:
        ConfigError: it cannot be sharded by the strategy.
    """
    sharded = shard(model, decisions)
    return sharded.of_rank(rank), sharded.result
