# SPDX-License-Identifier: Apache-2.0
"""Partitions a Cell for one rank from the graph that MindSpore compiles for one device, by `sporeloom.partition`.

It uses neither MindSpore's parallel modes nor a virtual device: the same graph serves all ranks and meshes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.mindspore_compat.names import cell_graph_executor, mind_ir
from sporeloom.models.paths import path_matches
from sporeloom.parallel.report import Report
from sporeloom.parallel.sharding import operators
from sporeloom.partition.graph import Graph
from sporeloom.partition.grid import MICROBATCHES, STAGES, DeviceGrid
from sporeloom.partition.held import MixedRowsError, PartitionError, ShardedGraph
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.mindir import UnreadableGraphError, read_graph
from sporeloom.partition.operation import Pin
from sporeloom.partition.parted import PartedAxes, UndividedAxisError, sharded_further
from sporeloom.partition.paths import functional_paths, with_paths
from sporeloom.partition.propagate import shard_graph
from sporeloom.partition.rank_mindir import write_rank
from sporeloom.runtime.compiler import faster_compilation
from sporeloom.runtime.cpu.branches import why_branching_fails
from sporeloom.runtime.cpu.inlining import BranchError, inline_functions
from sporeloom.runtime.cpu.partition import PartitionedGraph, refusal, remove_dump
from sporeloom.runtime.layouts import ParameterLayout, Slices
from sporeloom.strategy.layout import Layout, Shape
from sporeloom.strategy.mesh import Mesh

_phases = itertools.count()

FAILURES = (AttributeError, RuntimeError, TypeError, ValueError)
LEFT_TO_PYTHON = ("PyExecute", "AbstractAny")
"""Words in MindSpore's error if a graph contains something that it would run in Python."""
SYNTAX_LEVEL, STRICT = "MS_DEV_JIT_SYNTAX_LEVEL", "0"
"""MindSpore's variable for whether its compiler may leave parts of a graph to Python."""
_LAXER = re.compile(r"\.? You can use os\.environ\[.*?current syntax\.")
NO_PYTHON = (
    "a graph computes with operators of MindSpore alone: take no Tensor to NumPy or Python inside construct (asnumpy, item, "
    "an f-string), but return it"
)


@dataclass(frozen=True)
class GridLayout:
    """The layout of one parameter, with the interface of `ParameterLayout`."""

    layout: ValueLayout
    grid: DeviceGrid
    local_shape: Shape
    optimizer_group: str = ""

    def slices(self, global_shape: Shape, rank: int, groups: Mapping[str, Sequence[int]]) -> Slices:
        """Slices of the full parameter that `rank` stores."""
        return self.operator_slices(global_shape, rank)

    def operator_slices(self, global_shape: Shape, rank: int) -> Slices:
        """Slices that operators use: equal to `slices`, because the layout includes sharding over replicas (ZeRO)."""
        result = []
        for size, axes in zip(global_shape, self.layout.dims, strict=True):
            length = size // self.grid.degree(axes)
            start = self.grid.index(rank, axes) * length
            result.append(slice(start, start + length))
        return tuple(result)


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


def decide(cell: nn.Cell, mesh: Mesh, num_microbatches: int = 1) -> Decisions:
    """Derive decisions from the reports of the parallelized networks in `cell`.

    Args:
        num_microbatches: number of microbatches over which the batch is sharded as well (see `partition/microbatches.py`).

    Raises:
        ConfigError: rules or optimizer parallelism divide an axis incompatibly.
    """
    degrees, layouts, pinned = mesh.sharding_axes, dict[str, Layout](), dict[str, Pin]()
    functional: list[tuple[str, bool, Pin]] = []
    try:
        for path, report in reports_in(cell):
            for said in report.parameters:
                dims = sharded_further(said.layout, degrees, said.optimizer_shards) if said.layout else ()
                layouts[said.name] = dims
            for operator, rule in report.owners.items():
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

    def resolved(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return tuple(map(axes.layout, layouts))

    def resolved_pin(pin: Pin) -> Pin:
        return Pin(resolved(pin.inputs), None if pin.outputs is None else resolved(pin.outputs), pin.local, pin.source)

    return Decisions(
        axes.grid,
        {name: axes.layout(layout) for name, layout in layouts.items()},
        {path: resolved_pin(pin) for path, pin in pinned.items()},
        [(pattern, optional, resolved_pin(pin)) for pattern, optional, pin in functional],
        takes_batch=getattr(cell, "takes_batch", True),
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


def compile_for_one_device(cell: nn.Cell, inputs: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
    """Compile `cell` for one device, with every pass of MindSpore's front end. Operators have their paths as attributes.

    Args:
        inputs: shape and NumPy dtype of each input.

    Raises:
        ConfigError: MindSpore cannot compile it.
    """
    for operator in operators(cell):
        operator.primitive.add_prim_attr("path", operator.path)
    with faster_compilation():
        try:
            model = _compiled(cell, inputs)
        except FAILURES as error:
            raise ConfigError(_why_not(error, cell, inputs)) from None
    try:
        inline_functions(model)
    except BranchError as error:
        raise ConfigError(why_branching_fails(error, cell)) from None
    return model


def _compiled(cell: nn.Cell, inputs: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
    tensors = [
        Tensor.from_numpy(np.zeros(shape, dtype)) for shape, dtype in inputs
    ]  # never written, so they use no memory
    # A new phase: for an earlier one MindSpore would return its graph, even if the Cell has changed.
    name = f"export.mindir.one_device.{next(_phases)}"
    try:
        with _undrawn(cell):
            phase, _ = cell_graph_executor.compile(cell, *tensors, phase=name, do_convert=False)
        written = cell_graph_executor._graph_executor.get_func_graph_proto(phase, "mind_ir", False)
    except FAILURES:
        remove_dump(0)
        raise
    return mind_ir.ModelProto.FromString(written)


@contextlib.contextmanager
def _undrawn(cell: nn.Cell) -> Iterator[None]:
    """Keep MindSpore from initializing parameters when it compiles a network for one device: they would be those of the
    full model on one rank."""
    cell.__dict__["init_parameters_data"] = lambda **_: {}
    try:
        yield
    finally:
        del cell.__dict__["init_parameters_data"]


def _why_not(error: Exception, cell: nn.Cell, inputs: Sequence[tuple[Shape, Any]]) -> str:
    """The message for a failed compilation, with its position. For code that MindSpore would leave to Python, which it
    reports without a position, compile again in strict mode."""
    if any(word in str(error) for word in LEFT_TO_PYTHON):
        before = os.environ.get(SYNTAX_LEVEL)
        os.environ[SYNTAX_LEVEL] = STRICT
        try:
            _compiled(cell, inputs)
        except FAILURES as strict:
            error = strict
        finally:
            os.environ.pop(SYNTAX_LEVEL)
            os.environ |= {SYNTAX_LEVEL: before} if before is not None else {}
        said = _LAXER.sub("", refusal(error, "MindSpore would leave a part of the network to Python"))
        return f"{said}; {NO_PYTHON}"
    return refusal(error, "MindSpore cannot compile the network")


@contextlib.contextmanager
def whole_again(parameters: Iterable[Parameter], shapes: Mapping[int, Shape]) -> Iterator[None]:
    """Give parameters that an earlier graph left as shards their global shapes within the block, then restore their values.

    Args:
        shapes: id of a parameter -> global shape; names are not unique across networks.
    """
    parts = []
    for parameter in parameters:
        if parameter.sliced and tuple(parameter.shape) != (whole := shapes[id(parameter)]):
            parts.append((parameter, part := parameter.asnumpy().copy()))
            nothing = np.zeros(whole, part.dtype)  # uses no memory until it is written
            parameter.set_data(Tensor.from_numpy(nothing), slice_shape=True)
    try:
        yield
    finally:
        for parameter, part in parts:
            parameter.set_data(Tensor(part, dtype=parameter.dtype), slice_shape=True)


def _by_row(graph: Graph, grid: DeviceGrid, takes_batch: bool) -> list[Layout]:
    batch = tuple(axis for axis in grid.degrees if axis.partition(":")[0].partition("/")[0] in (MICROBATCHES, "dp"))
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

    def of_rank(self, rank: int, graph: Graph | None = None) -> PartitionedGraph:
        """The graph that `rank` executes: all of it, or `graph`, a part of it."""
        start = time.perf_counter()
        sharded = self.result if graph is None else replace(self.result, graph=graph)
        written, groups = write_rank(sharded, self.model, self.grid, rank)
        return PartitionedGraph(written, self.layouts, groups, rank, time.perf_counter() - start)


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
) -> Sharded:
    """Shard one device's graph. Ranks receive full inputs, or inputs in the layouts `held`.

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
        sharded = shard_graph(graph, grid, wanted, inputs, pinned, parts, gathers_outputs)
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


def partition_for_rank(
    model: mind_ir.ModelProto, decisions: Decisions, rank: int
) -> tuple[PartitionedGraph, ShardedGraph]:
    """The sharded graph of one device for `rank`, which receives full inputs.

    Raises:
        ConfigError: it cannot be sharded by the strategy.
    """
    sharded = shard(model, decisions)
    return sharded.of_rank(rank), sharded.result
