# SPDX-License-Identifier: Apache-2.0
"""Compiles a Cell for one rank of a virtual Ascend cluster, and returns MindSpore's partitioned graph as data."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line
from sporeloom.mindspore_compat.names import cell_graph_executor, mind_ir, numpy_type
from sporeloom.runtime.compiler import auto_parallel_context, faster_compilation
from sporeloom.runtime.cpu.target import virtual_ascend
from sporeloom.runtime.graph_checks import check_graph, groups_in
from sporeloom.runtime.layouts import ParameterLayout, read_layouts
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape

_phases = itertools.count()

DECIDES_BY_DATA = (
    "has an `if` or `while` on a Tensor, which MindSpore does not partition; compute every way "
    "and choose with ops.where(condition, a, b), or let a number given to __init__ decide"
)
BRANCHES = ("if ", "elif ", "while ")
_FRAME = re.compile(r"In file (\S+?):(\d+)")
_OUR_PLUMBING = (
    str(Path(ms.__file__).parent),
    *(str(Path(__file__).parents[2] / part) for part in ("runtime", "parallel")),
    "<",  # source text made by `runtime.calls`
)


@dataclass(frozen=True)
class PartitionedGraph:
    """One rank's graph of a Cell, before it is lowered or executed."""

    model: mind_ir.ModelProto = field(repr=False)
    layouts: dict[str, ParameterLayout]
    groups: dict[str, list[int]]
    """Communication groups that the compiler created: name -> ranks."""
    rank: int
    compile_s: float

    @property
    def held_layouts(self) -> dict[str, ParameterLayout]:
        """Layouts of the parameters in this rank's graph."""
        held = self.parameters
        return {name: layout for name, layout in self.layouts.items() if name in held}

    @property
    def parameters(self) -> dict[str, Shape]:
        """Local shape of each parameter in this rank's graph."""
        return {p.name.rpartition(":")[2]: tuple(p.dims) for p in self.model.graph.parameter}


def partition(
    cell: nn.Cell,
    strategy: Strategy,
    rank: int,
    inputs: Sequence[tuple[Shape, Any]],
    layouts_file: Path | None = None,
) -> PartitionedGraph:
    """Partition `cell` for `rank` with MindSpore.

    Args:
        inputs: global shape and NumPy dtype of each input.
        layouts_file: file to which MindSpore also writes the layouts in its own format.

    The parameters are not materialised. Every front-end pass runs (sharding, pipeline split, gradients, optimizer
    parallel, recompute); kernel selection does not.

    Raises:
        ConfigError: MindSpore cannot partition it, or the graph would not be equivalent to one device.
    """
    start = time.perf_counter()
    executor = cell_graph_executor._graph_executor
    with (
        faster_compilation(),
        virtual_ascend(rank, strategy.mesh.size) as groups,
        auto_parallel_context(strategy, rank, layouts_file),
    ):
        tensors = [Tensor(np.zeros(shape, dtype)) for shape, dtype in inputs]
        # A new phase: for an earlier one MindSpore would return its graph, even if the Cell has changed.
        name = f"export.mindir.{rank}.{next(_phases)}"
        try:
            phase, _ = cell_graph_executor.compile(cell, *tensors, phase=name, do_convert=False)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            remove_dump(rank)
            what = f"{strategy.source}: MindSpore cannot partition the network"
            raise ConfigError(refusal(error, what)) from None  # MindSpore's traceback is in C++
        raw_layouts = executor.get_parameter_layout(phase)
        model = mind_ir.ModelProto.FromString(executor.get_func_graph_proto(phase, "mind_ir", False))
        layouts = read_layouts(raw_layouts)
        used = groups_in(model) | {layout.optimizer_group for layout in layouts.values()}
        held = {name: ranks for name, ranks in groups.items() if name in used}
        if strategy.mesh.size > 1:
            check_graph(model, executor.get_strategy(phase), held, cell, strategy.source)
    return PartitionedGraph(model, layouts, held, rank, time.perf_counter() - start)


def refusal(error: Exception, what: str) -> str:
    """The message: `what` happened, the first line of MindSpore's error, and the last source line outside of MindSpore
    and this package that led to it."""
    said = str(error).strip()
    first = first_line(error)
    message = f"{what}: {first}"
    if "has multiple users" in first:
        message += "; operators that use it got different layouts: write a rule for each"
    frames = [(file, int(line)) for file, line in _FRAME.findall(said) if not file.startswith(_OUR_PLUMBING)]
    if not frames:
        return message
    code = linecache.getline(*frames[-1]).strip()
    decides = code.startswith(BRANCHES)
    return f"{message}; at {frames[-1][0]}:{frames[-1][1]}, {code}" + (f": it {DECIDES_BY_DATA}" if decides else "")


def remove_dump(rank: int) -> None:
    """Remove the dump of a failed graph, which MindSpore writes to the working directory."""
    folder = Path(f"rank_{rank}/om")
    (folder / "analyze_fail.ir").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it does not exist, or contains other files
        os.removedirs(folder)


def describe_inputs(arrays: Sequence[NDArray[Any] | Tensor]) -> list[tuple[Shape, Any]]:
    """Shape and NumPy dtype of each input."""
    described = []
    for array in arrays:
        dtype = numpy_type(array.dtype) if isinstance(array, Tensor) else np.asarray(array).dtype
        described.append((tuple(array.shape), dtype))
    return described
