# SPDX-License-Identifier: Apache-2.0
"""What this process runs a parallel network with: MindSpore itself on Ascend and GPU, Programs on CPU."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_process_group_ranks, get_rank, init
from numpy.typing import NDArray

from mindloom.errors import ConfigError
from mindloom.parallel.report import DERIVED, ParameterReport, Report
from mindloom.parallel.step import TrainStep
from mindloom.runtime.compile import (
    PartitionedGraph,
    describe_inputs,
    faster_compilation,
    partition,
    set_auto_parallel_context,
)
from mindloom.runtime.environment import end_with_msrun, job_name, launched_processes, launched_rank
from mindloom.runtime.executor import Program
from mindloom.runtime.find_nan import NanFinder
from mindloom.runtime.kept_graphs import kept_graph, strategy_key
from mindloom.runtime.layouts import ParameterLayout, learn_layouts, read_layouts
from mindloom.runtime.reduced import check_reduced
from mindloom.runtime.target import WORLD, TargetError, compiled_size, pin_cpu, virtual_ascend
from mindloom.runtime.transport import Collectives, Transport
from mindloom.strategy.checks import launch_problems
from mindloom.strategy.config import Strategy
from mindloom.strategy.layout import Shape

_engine_count = itertools.count()


def device_target() -> str:
    """`Ascend` or `GPU` where MindSpore finds one, else `CPU`."""
    target = ms.get_context("device_target")
    return str(target)


class Engine:
    """Runs Cells under one strategy, in one process of a job. There is one in a process, as MindSpore's context is one."""

    def __init__(self, strategy: Strategy):
        if problems := launch_problems(strategy, launched_processes()):
            raise ConfigError(problems)
        self.strategy = strategy
        self.rank = launched_rank()
        self.transport: Transport | None = None
        self.target = device_target()
        self.layouts: dict[str, ParameterLayout] = {}
        self.groups: dict[str, list[int]] = {}
        self.nan_finder: NanFinder | None = None
        """What looks at every node of the graphs compiled from now on."""
        self.rounded: Counter[str] = Counter()
        """Kinds of operators of the largest graph that are computed in float32 and give bfloat16, and how many of each."""
        self._programs: dict[Any, Program] = {}
        self._in_bfloat16: weakref.WeakKeyDictionary[nn.Cell, bool] = weakref.WeakKeyDictionary()
        ms.set_context(mode=ms.GRAPH_MODE)
        if strategy.mesh.size == 1:
            if self.target == "CPU":
                if strategy.offload:
                    raise ConfigError(f"{strategy.at('offload')}: one CPU device has one memory; leave it out")
                with contextlib.suppress(TargetError):  # only a later virtual target needs it, and says so
                    pin_cpu()
            return
        if self.target == "CPU":
            self._start_on_cpu()
        else:
            init()
            if os.environ.get("MS_ROLE") == "MS_SCHED":
                sys.exit(0)  # MindSpore's scheduler stays, inside the exit, until the workers are done
            if get_group_size() != strategy.mesh.size:
                raise ConfigError(launch_problems(strategy, get_group_size()))
            self.rank = get_rank()
            set_auto_parallel_context(strategy, self.rank)
            if strategy.offload:
                ms.set_context(memory_optimize_level="O0")  # which moving to the host and back wants

    def _start_on_cpu(self) -> None:
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            sys.exit(0)  # CPU processes find each other without msrun's scheduler
        end_with_msrun()
        pin_cpu()
        if compiled_size() not in (None, self.strategy.mesh.size):
            raise ConfigError(
                f"{self.strategy.at('mesh')}: this process has compiled for {compiled_size()} devices before, and MindSpore "
                f"keeps that number; run what needs {self.strategy.mesh.size} in new processes"
            )
        # A process that starts a second engine does so on every rank.
        size = self.strategy.mesh.size
        job = job_name() if size > 1 else f"alone-{os.getpid()}"
        self.transport = Transport(self.rank, size, f"{job}-{next(_engine_count)}")
        atexit.register(self.transport.close)

    @property
    def in_last_stage(self) -> bool:
        """Whether this rank knows losses and logits."""
        return self.rank >= self.strategy.mesh.first_rank_of_last_stage

    @property
    def is_log_rank(self) -> bool:
        """Whether this is the one rank that tells and writes what all know."""
        return self.rank == self.strategy.mesh.first_rank_of_last_stage

    @property
    def partitions_itself(self) -> bool:
        """Whether graphs are partitioned here and executed by CPU processes."""
        return self.target == "CPU" and self.strategy.mesh.size > 1

    def all_reduce(self) -> ops.AllReduce | None:
        """The operator that adds a number up over all ranks, for use in a graph; None on one device."""
        if self.strategy.mesh.size == 1:
            return None
        if self.transport is None:
            return ops.AllReduce()
        with virtual_ascend(self.rank, self.strategy.mesh.size):  # an AllReduce asks for its group when it is made
            return ops.AllReduce(group=WORLD)

    def prepare(self, cell: nn.Cell, *inputs: Tensor) -> None:
        """Compile `cell` for inputs like these; `run` would do so on its first call."""
        if self.partitions(cell):
            self.program(cell, inputs).compile(inputs)
        else:
            # Devices keep MindSpore's own way: the faster one was never tried on them.
            with faster_compilation() if self.target == "CPU" else contextlib.nullcontext():
                cell.compile(*inputs)
            if self.strategy.mesh.size > 1:
                self.layouts |= read_layouts(cell.parameter_layout_dict)
                for layout in self.layouts.values():
                    if layout.optimizer_group and layout.optimizer_group not in self.groups:
                        self.groups[layout.optimizer_group] = get_process_group_ranks(layout.optimizer_group)
                if self._learn_layouts(cell, self.layouts, self.groups) and isinstance(cell, TrainStep):
                    raise ConfigError(
                        f"{self.strategy.source}: MindSpore cut parameters that no rule is for, so the norm of the "
                        f"gradients would be wrong; write rules for {', '.join(_derived(cell))}"
                    )

    def run(self, cell: nn.Cell, *inputs: Tensor) -> Any:
        """Call `cell`, a Cell around a parallelized network, with the whole batch."""
        if self.partitions(cell):
            return self.program(cell, inputs).run(inputs)
        return cell(*inputs)

    def partitions(self, cell: nn.Cell) -> bool:
        """Whether a Program executes `cell`: on several CPU processes always, on one CPU device if it computes in bfloat16,
        which MindSpore's own kernels for CPUs do not."""
        if self.partitions_itself:
            return True
        if cell not in self._in_bfloat16:
            is_narrow = any(getattr(each, "dtype", None) == ms.bfloat16 for _, each in cell.cells_and_names())
            self._in_bfloat16[cell] = is_narrow and self.target == "CPU"
        return self._in_bfloat16[cell]

    def program(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> Program:
        """The compiled part of this rank, compiled on first use for each set of input shapes."""
        if self.transport is None:
            self._start_on_cpu()
        assert self.transport is not None
        described = describe_inputs(inputs)
        key = (id(cell), cell.training, str(described))
        if key not in self._programs:
            graph = self._graph(cell, described)
            if self._learn_layouts(cell, graph.held_layouts, graph.groups) and isinstance(cell, TrainStep):
                cell.update_shares(self.rank)  # what was learned decides how much of each gradient this rank adds
                graph = self._graph(cell, described)
            trainable = {parameter.name for parameter in cell.trainable_params()}
            check_reduced(graph, self.strategy, trainable, getattr(cell, "trained", ()))
            self.layouts |= graph.layouts
            self.groups |= graph.groups
            name = f"program {len(self._programs)}"
            self._programs[key] = program = Program(graph, cell, self.transport, name, self.nan_finder)
            self.rounded = max(self.rounded, program.widened.rounded, key=Counter.total)
        return self._programs[key]

    def _graph(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> PartitionedGraph:
        """This rank's part of a Cell. Where `cell.graph_key` says what its graph depends on, an earlier run's is taken."""

        def make() -> PartitionedGraph:
            return partition(cell, self.strategy, self.rank, described)

        key = getattr(cell, "graph_key", None)
        if key is None:
            return make()
        inputs = [[list(shape), np.dtype(dtype).str] for shape, dtype in described]
        more = {"strategy": strategy_key(self.strategy), "rank": self.rank, "inputs": inputs, "training": cell.training}
        more |= {"shares": list(cell.shares)} if isinstance(cell, TrainStep) else {}
        return kept_graph({"network": key, **more}, make)

    def _learn_layouts(
        self, cell: nn.Cell, layouts: Mapping[str, ParameterLayout], groups: dict[str, list[int]]
    ) -> bool:
        """`learn_layouts` for every parallelized network in `cell`. Returns whether a report has changed."""
        reports = {id(c.parallel_report): c.parallel_report for _, c in cell.cells_and_names() if _is_said(c)}
        changed = [learn_layouts(r, layouts, groups, self.rank, self.strategy.source) for r in reports.values()]
        return any(changed)

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        """What rank `source` gave, on every rank; all give an array of one shape and dtype."""
        if self.strategy.mesh.size == 1:
            return array
        if self.transport is None:
            result: NDArray[Any] = ops.Broadcast(source)((Tensor(array),))[0].asnumpy()
            return result
        group = Collectives(self.transport, range(self.strategy.mesh.size), "broadcast")
        return group.broadcast(array, source)

    def share(self, value: Any, source: int) -> Any:
        """What rank `source` gave, a value that JSON can hold, on every rank; the others' is not looked at."""
        if self.strategy.mesh.size == 1:
            return value
        if self.transport is not None:
            return self.transport.share_value(value, source, "share")
        text = np.frombuffer(json.dumps(value).encode(), np.uint8).astype(np.int32)
        length = int(self.broadcast(np.asarray([len(text)], np.int32), source)[0])
        padded = np.zeros(max(1024, 1 << (length - 1).bit_length()), np.int32)  # few lengths: each is compiled once
        padded[: len(text) if self.rank == source else 0] = text if self.rank == source else ()
        return json.loads(self.broadcast(padded, source)[:length].astype(np.uint8).tobytes())

    def refresh(self, net: nn.Cell, report: Report) -> None:
        """Give the parameters that several stages hold, in all of them, the value they were trained to: before a network that
        shares them runs by itself."""
        mesh, held = self.strategy.mesh, {parameter.name: parameter for parameter in net.get_parameters()}
        for name in report.tied:
            parameter, of = held[name], report.of(name)
            for place, source in enumerate(mesh.ranks_of_stage(of.stage)):
                mine = tuple(parameter.shape) == of.local_shape
                array = parameter.asnumpy() if mine else np.zeros(of.local_shape, np.float32)
                trained = self.broadcast(array.copy(), source)
                if mine and self.rank != source and self.rank % mesh.stage_size == place:
                    parameter.set_data(Tensor(trained, dtype=parameter.dtype), slice_shape=parameter.sliced)

    def on_lost_rank(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with a line that names it when another rank is gone, before this process ends for it."""
        if self.transport is not None:
            self.transport.on_lost = tell

    def largest(self, value: int) -> int:
        """The largest of what the ranks gave, on every rank."""
        if self.strategy.mesh.size == 1:
            return value
        if self.transport is None:
            return int(ops.AllReduce(ops.ReduceOp.MAX)(Tensor([value], ms.int32)).asnumpy()[0])
        return max(self.transport.gather_values(value, "largest"))

    def first_not_finite(self) -> list[str]:
        """Operators that made numbers that are not finite out of finite ones, with their ranks, on all ranks."""
        mine = self.nan_finder.first if self.nan_finder else None
        found = self.transport.gather_values(mine, "not finite") if self.transport else [mine]
        ranks = {what: [str(rank) for rank, each in enumerate(found) if each == what] for what in found if what}
        return [f"{what} (rank {', '.join(of)})" for what, of in ranks.items()]

    def watch_for(self, seconds: float) -> None:
        """Let every rank say where it is when one is in a collective for so long."""
        if self.transport is not None:
            self.transport.watchdog_s = seconds

    def announce_step(self, step: int) -> None:
        """Let the other ranks know how far this one is, for the message should it be killed."""
        if self.transport is not None:
            self.transport.announce_step(step)

    def slices_to_write(self, name: str, parameter: ParameterReport) -> tuple[slice, ...] | None:
        """Where this rank's part of a parameter or optimizer state lies, if it is the one to write it.

        Of the ranks that hold the same part the first one writes it; None for all others.
        """
        shape, mesh = parameter.global_shape, self.strategy.mesh
        if mesh.size == 1:
            return tuple(slice(0, length) for length in shape)
        layout = self.layouts.get(name)
        if layout is None or mesh.coordinate(self.rank, "pp") != parameter.stage:
            return None
        ranks_of_stage = mesh.ranks_of_stage(parameter.stage)
        mine = layout.operator_slices(shape, self.rank)
        holders = [rank for rank in ranks_of_stage if layout.operator_slices(shape, rank) == mine]
        group = self.groups[layout.optimizer_group] if layout.optimizer_group else [self.rank]
        return layout.slices(shape, self.rank, self.groups) if min(holders) in group else None

    def held_slices(self, name: str, global_shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Where the part of a parameter or optimizer state lies that this rank computes with; None: it has none."""
        if self.strategy.mesh.size == 1:
            return tuple(slice(0, length) for length in global_shape)
        layout = self.layouts.get(name)
        return layout.slices(global_shape, self.rank, self.groups) if layout else None

    def close(self) -> None:
        """Leave the job in good order; also done when the process ends."""
        if self.transport is not None:
            self.transport.close()


def _derived(cell: nn.Cell) -> list[str]:
    reports = [c.parallel_report for _, c in cell.cells_and_names() if _is_said(c)]
    return [parameter.name for report in reports for parameter in report.parameters if parameter.rule == DERIVED]


def _is_said(cell: nn.Cell) -> bool:
    return isinstance(getattr(cell, "parallel_report", None), Report)
