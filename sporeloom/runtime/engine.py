# SPDX-License-Identifier: Apache-2.0
"""What this process runs a parallel network with, whatever the device: a backend, and what follows from its layouts."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from sporeloom.errors import ConfigError
from sporeloom.parallel.report import ParameterReport, Report
from sporeloom.runtime.backend import Backend
from sporeloom.runtime.cpu.processes import CpuProcesses
from sporeloom.runtime.cpu.spmd_processes import SpmdProcesses
from sporeloom.runtime.cpu.target import pin_cpu
from sporeloom.runtime.environment import launched_processes
from sporeloom.runtime.native import Devices
from sporeloom.runtime.native_spmd import SpmdDevices
from sporeloom.runtime.symbols import TargetError
from sporeloom.strategy.checks import launch_problems
from sporeloom.strategy.config import Strategy


def _join(strategy: Strategy, target: str) -> Backend:
    """This rank of a job of several. MindSpore partitions only for `engine: mindspore`.

    Raises:
        ConfigError: what partitions does not have what the strategy asks for, or there are more or fewer processes.
    """
    if target == "CPU":
        return SpmdProcesses.join(strategy) if strategy.is_spmd else CpuProcesses.join(strategy)
    if problems := strategy.device_problems():
        raise ConfigError(problems)
    return SpmdDevices.join(strategy) if strategy.is_spmd else Devices.join(strategy)


class Engine:
    """Runs Cells under one strategy, in one process of a job. There is one in a process, as MindSpore's context is one."""

    def __init__(self, strategy: Strategy, target: str, backend: Backend):
        self.strategy, self.target, self.backend = strategy, target, backend
        self.rank = backend.rank
        self._in_bfloat16: weakref.WeakKeyDictionary[nn.Cell, bool] = weakref.WeakKeyDictionary()
        self._narrow: CpuProcesses | None = None

    @classmethod
    def start(cls, strategy: Strategy) -> Engine:
        """The engine of this process, once it has met the others of its job. msrun's scheduler ends here.

        Raises:
            ConfigError: the strategy and the launched processes do not fit each other.
        """
        if problems := launch_problems(strategy, launched_processes()):
            raise ConfigError(problems)
        target = str(ms.get_context("device_target"))  # what MindSpore finds: Ascend, GPU, or else CPU
        ms.set_context(mode=ms.GRAPH_MODE)
        if strategy.mesh.size > 1:
            return cls(strategy, target, _join(strategy, target))
        if target == "CPU":
            if strategy.offload:
                raise ConfigError(f"{strategy.at('offload')}: one CPU device has one memory; leave it out")
            with contextlib.suppress(TargetError):  # only a later virtual target needs it, and says so
                pin_cpu()
        return cls(strategy, target, Backend(strategy))

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
        """Whether graphs are partitioned here, not by MindSpore."""
        return self.backend.partitions

    @property
    def rounded(self) -> Counter[str]:
        """Kinds of operators of the largest graph that are computed in float32 and give bfloat16, and how many of each."""
        return (self._narrow or self.backend).rounded

    def all_reduce(self) -> ops.AllReduce | None:
        """The operator that adds a number up over all ranks, for use in a graph; None on one device."""
        return self.backend.all_reduce()

    def prepare(self, cell: nn.Cell, *inputs: Tensor) -> None:
        """Compile `cell` for inputs like these; `run` would do so on its first call."""
        self.backend_of(cell).prepare(cell, inputs)

    def run(self, cell: nn.Cell, *inputs: Tensor) -> Any:
        """Call `cell`, a Cell around a parallelized network, with the whole batch."""
        return self.backend_of(cell).run(cell, inputs)

    def backend_of(self, cell: nn.Cell) -> Backend:
        """What computes `cell`: on one CPU device a Program if it is in bfloat16, which MindSpore's own kernels for CPUs are
        not.

        Raises:
            ConfigError: it is in bfloat16 on a GPU, where MindSpore adds no two such numbers.
        """
        if self.target == "Ascend" or self.partitions_itself:
            return self.backend
        if cell not in self._in_bfloat16:
            dtypes = (getattr(each, "dtype", None) for _, each in cell.cells_and_names())
            self._in_bfloat16[cell] = ms.bfloat16 in dtypes
        if not self._in_bfloat16[cell]:
            return self.backend
        if self.target == "GPU":
            raise ConfigError("bfloat16: MindSpore has no kernels for GPUs; give --compute-dtype float16 or float32")
        self._narrow = self._narrow or CpuProcesses.join(self.strategy)
        return self._narrow

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        """What rank `source` gave, on every rank; all give an array of one shape and dtype."""
        return self.backend.broadcast(array, source)

    def share(self, value: Any, source: int) -> Any:
        """What rank `source` gave, a value that JSON can hold, on every rank; the others' is not looked at."""
        return self.backend.share(value, source)

    def largest(self, value: int) -> int:
        """The largest of what the ranks gave, on every rank."""
        return self.backend.largest(value)

    def total(self, value: float) -> float:
        """The sum of what the ranks gave, on every rank."""
        return self.backend.total(value)

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

    def slices_to_write(self, name: str, parameter: ParameterReport) -> tuple[slice, ...] | None:
        """Where this rank's part of a parameter or optimizer state lies, if it is the one to write it.

        Of the ranks that hold the same part the first one writes it; None for all others.
        """
        shape, mesh = parameter.global_shape, self.strategy.mesh
        if mesh.size == 1:
            return tuple(slice(0, length) for length in shape)
        layout = self.backend.layouts.get(name)
        if layout is None or mesh.coordinate(self.rank, "pp") != parameter.stage:
            return None
        ranks_of_stage = mesh.ranks_of_stage(parameter.stage)
        mine = layout.operator_slices(shape, self.rank)
        holders = [rank for rank in ranks_of_stage if layout.operator_slices(shape, rank) == mine]
        groups = self.backend.groups
        group = groups[layout.optimizer_group] if layout.optimizer_group else [self.rank]
        return layout.slices(shape, self.rank, groups) if min(holders) in group else None

    def held_slices(self, name: str, global_shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Where the part of a parameter or optimizer state lies that this rank computes with; None: it has none."""
        if self.strategy.mesh.size == 1:
            return tuple(slice(0, length) for length in global_shape)
        layout = self.backend.layouts.get(name)
        return layout.slices(global_shape, self.rank, self.backend.groups) if layout else None

    def holds_now(self, parameter: Parameter, global_shape: tuple[int, ...]) -> bool:
        """Whether this rank has the value of a parameter, or of its part of one, as it is now: in a pipeline the stages that
        compute with it have."""
        if self.strategy.mesh.pp == 1:
            return True
        return self.held_slices(parameter.name, global_shape) is not None and self.backend.is_current(parameter)

    def close(self) -> None:
        """Leave the job in good order; also done when the process ends."""
        for backend in filter(None, (self._narrow, self.backend)):
            backend.close()
