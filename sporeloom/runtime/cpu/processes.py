# SPDX-License-Identifier: Apache-2.0
"""Backend of CPU processes, each of which partitions and executes its own graph."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError, Problems
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.backend import Backend
from sporeloom.runtime.compiler import without_collection
from sporeloom.runtime.cpu.compilation_cache import cached_graph, strategy_key
from sporeloom.runtime.cpu.executor import Program
from sporeloom.runtime.cpu.find_nan import NanFinder
from sporeloom.runtime.cpu.partition import PartitionedGraph, describe_inputs, partition
from sporeloom.runtime.cpu.reduced import check_lost, check_reduced, lost_gradients
from sporeloom.runtime.cpu.target import WORLD, compiled_size, pin_cpu, virtual_ascend
from sporeloom.runtime.cpu.transport import Collectives, Transport
from sporeloom.runtime.environment import end_with_msrun, job_name, launched_rank
from sporeloom.runtime.layouts import learn_from, parallelized
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape

_jobs = itertools.count()


class Runnable(Protocol):
    """A compiled Cell."""

    @property
    def graphs(self) -> Sequence[PartitionedGraph]:
        """The graphs that this rank executes."""
        ...

    def compile(self, inputs: Sequence[Tensor]) -> None: ...

    def run(self, inputs: Sequence[Tensor]) -> Any: ...


class ProgramBackend(Backend, ABC):
    """A rank that runs compiled Cells and caches them by the shapes of their inputs."""

    partitions = True

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.programs: dict[tuple[int, bool, str], Runnable] = {}
        """(id of the Cell, whether it is in training mode, shapes of its inputs) -> compiled Cell."""

    def prepare(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> None:
        self.program(cell, inputs).compile(inputs)

    def run(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> Any:
        return self.program(cell, inputs).run(inputs)

    def program(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> Runnable:
        """This rank's compiled Cell, compiled on first use for each set of input shapes."""
        described = describe_inputs(inputs)
        key = (id(cell), cell.training, str(described))
        if key not in self.programs:
            with without_collection():
                self.programs[key] = self._compiled(cell, described)
        return self.programs[key]

    @abstractmethod
    def _compiled(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> Runnable:
        """Compile this rank's graph for inputs of these shapes and NumPy dtypes."""


class CpuProcesses(ProgramBackend):
    """One of the CPU processes of a job, which may be the only one."""

    finds_nan = True
    compiles_for_all = False
    """Whether the graph of one device serves all ranks, so that MindSpore is never set to several devices."""

    def __init__(self, strategy: Strategy, rank: int, transport: Transport):
        super().__init__(strategy, rank)
        self.transport = transport
        self._nan_finder: NanFinder | None = None

    @classmethod
    def join(cls, strategy: Strategy) -> CpuProcesses:
        """Join the other processes of the job. msrun's scheduler, which is not used here, exits here.

        Raises:
            ConfigError: this process has compiled for another number of devices.
        """
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            sys.exit(0)
        end_with_msrun()
        pin_cpu()
        size = strategy.mesh.size
        if not cls.compiles_for_all and compiled_size() not in (None, size):
            raise ConfigError(
                f"{strategy.at('mesh')}: this process has compiled for {compiled_size()} devices before, and MindSpore "
                f"keeps that number; run what needs {size} in new processes"
            )
        # If a process joins a second job, all ranks do.
        job = job_name() if size > 1 else f"alone-{os.getpid()}"
        transport = Transport(launched_rank(), size, f"{job}-{next(_jobs)}")
        atexit.register(transport.close)
        return cls(strategy, launched_rank(), transport)

    def run(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> Any:
        if self._nan_finder:
            self._nan_finder.first = None
        return super().run(cell, inputs)

    def _compiled(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> Runnable:
        trainable = {parameter.name for parameter in cell.trainable_params()} & parallelized(cell)
        problems = Problems()
        graph = problems.of(self._checked, cell, described, trainable)
        self.agree(problems)
        assert graph is not None  # or it had problems
        if self.strategy.mesh.pp > 1:  # reported on all ranks, not only on the one whose graph shows it
            found = self.transport.gather_values(lost_gradients(graph, trainable), "lost gradients")
            check_lost(set().union(*found), self.strategy)
        self.layouts |= graph.layouts
        self.groups |= graph.groups
        program = Program(graph, cell, self.transport, f"program {len(self.programs)}", self._nan_finder)
        self.rounded = max(self.rounded, program.widened.rounded, key=Counter.total)
        return program

    def _checked(
        self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]], trainable: Collection[str]
    ) -> PartitionedGraph:
        """This rank's graph of a Cell, checked to be equivalent to one device.

        Raises:
            ConfigError: it is not.
        """
        graph = self._graph(cell, described)
        source = self.strategy.source
        if learn_from(cell, graph.held_layouts, graph.groups, self.rank, source) and isinstance(cell, TrainStep):
            cell.update_shares(self.rank)  # the layouts determine this rank's shares of gradient norms
            graph = self._graph(cell, described)
        check_reduced(graph, self.strategy, trainable, getattr(cell, "trained", ()))
        return graph

    def _graph(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> PartitionedGraph:
        """This rank's graph of a Cell, from the compilation cache if `cell.graph_key` identifies it."""

        def make() -> PartitionedGraph:
            return partition(cell, self.strategy, self.rank, described)

        key = getattr(cell, "graph_key", None)
        if key is None:
            return make()
        inputs = [[list(shape), np.dtype(dtype).str] for shape, dtype in described]
        more = {"strategy": strategy_key(self.strategy), "rank": self.rank, "inputs": inputs, "training": cell.training}
        more |= {"shares": list(cell.shares)} if isinstance(cell, TrainStep) else {}
        return cached_graph({"network": key, **more}, make)

    def all_reduce(self) -> ops.AllReduce | None:
        if self.strategy.mesh.size == 1:
            return None
        with virtual_ascend(self.rank, self.strategy.mesh.size):  # an AllReduce looks up its group when it is created
            return ops.AllReduce(group=WORLD)

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        group = Collectives(self.transport, range(self.strategy.mesh.size), "broadcast")
        return group.broadcast(array, source)

    def share(self, value: Any, source: int) -> Any:
        return self.transport.share_value(value, source, "share")

    def largest(self, value: int) -> int:
        return max(self.transport.gather_values(value, "largest"))

    def total(self, value: float) -> float:
        return sum(self.transport.gather_values(value, "total"))

    def look_for_nan(self) -> None:
        self._nan_finder = NanFinder()

    def first_not_finite(self) -> list[str] | None:
        if self._nan_finder is None:
            return None
        found = self.transport.gather_values(self._nan_finder.first, "not finite")
        ranks = {what: [str(rank) for rank, each in enumerate(found) if each == what] for what in found if what}
        return [f"{what} (rank {', '.join(of)})" for what, of in ranks.items()]

    def on_lost_rank(self, tell: Callable[[str], None]) -> None:
        self.transport.on_lost = tell

    def watch_for(self, seconds: float) -> None:
        self.transport.watchdog_s = seconds

    def announce_step(self, step: int) -> None:
        self.transport.announce_step(step)

    def close(self) -> None:
        self.transport.close()
