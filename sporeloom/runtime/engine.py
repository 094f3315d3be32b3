# SPDX-License-Identifier: Apache-2.0
"""The engine runs a parallel network in this process on any device: a backend, and what follows from its layouts."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.parallel.report import ParameterReport, Report
from sporeloom.runtime.backend import Backend
from sporeloom.runtime.by_mindspore.devices import Devices
from sporeloom.runtime.cpu.processes import CpuProcesses
from sporeloom.runtime.environment import launched_processes
from sporeloom.runtime.spmd.devices import SpmdDevices
from sporeloom.strategy.checks import launch_problems
from sporeloom.strategy.config import SINGLE_DEVICE, Strategy
from sporeloom.strategy.tensor_slice import TensorSlice


def _join(strategy: Strategy, target: str) -> Backend:
    """Join a job of several ranks. MindSpore partitions only for `engine: mindspore`.

    Raises:
        ConfigError: the partitioner does not support the strategy, or the number of processes differs from its mesh.
    """
    if target == "CPU":
        if not strategy.is_spmd:
            raise ConfigError(
                f"{strategy.at('engine')}: MindSpore's partitioner is for Ascend and GPU devices, and this process has none; "
                "remove the line"
            )
        return CpuProcesses.join(strategy)
    if problems := strategy.device_problems():
        raise ConfigError(problems)
    return SpmdDevices.join(strategy) if strategy.is_spmd else Devices.join(strategy)


LARGE = 1 << 25
"""Elements of parameters and optimizer state from which on a training step on one CPU device is a `Program`, whose broadcasts
keep no indices in memory. See benchmarks/results/memory_timeline.md."""


class Engine:
    """Runs Cells under one strategy in one process of a job. A process starts one engine, because it has one MindSpore
    context."""

    def __init__(self, strategy: Strategy, target: str, backend: Backend):
        self.strategy, self.target, self.backend = strategy, target, backend
        self.rank = backend.rank
        self._is_program: weakref.WeakKeyDictionary[nn.Cell, bool] = weakref.WeakKeyDictionary()
        self._programs: CpuProcesses | None = None

    @classmethod
    def start(cls, strategy: Strategy, in_graphs: bool = False) -> Engine:
        """Start the engine of this process and join the other processes of its job. msrun's scheduler exits here.

        Args:
            in_graphs: whether a CPU process that is alone runs the graphs of this package, too, which can be recorded.

        Raises:
            ConfigError: the strategy and the launched processes do not fit each other.
        """
        if problems := launch_problems(strategy, launched_processes()):
            raise ConfigError(problems)
        target = str(ms.get_context("device_target"))  # found by MindSpore: Ascend, GPU, or else CPU
        ms.set_context(mode=ms.GRAPH_MODE)
        if strategy.mesh.size > 1:
            return cls(strategy, target, _join(strategy, target))
        if target == "CPU" and strategy.offload:
            raise ConfigError(f"{strategy.at('offload')}: one CPU device has one memory; leave it out")
        if target == "CPU" and in_graphs:
            return cls(strategy, target, CpuProcesses.join(strategy))
        return cls(strategy, target, Backend(strategy))

    def alone(self) -> Engine:
        """An engine of this process alone, which computes what the other ranks take no part in."""
        return Engine(SINGLE_DEVICE, self.target, Backend(SINGLE_DEVICE)) if self.strategy.mesh.size > 1 else self

    @property
    def in_last_stage(self) -> bool:
        """Whether this rank is in the last pipeline stage, which computes losses and logits."""
        return self.rank >= self.strategy.mesh.first_rank_of_last_stage

    @property
    def is_log_rank(self) -> bool:
        """Whether this is the logging rank, the one rank that prints and writes results common to all."""
        return self.rank == self.strategy.mesh.first_rank_of_last_stage

    @property
    def partitions_itself(self) -> bool:
        """Whether this package partitions graphs, not MindSpore."""
        return self.backend.partitions

    @property
    def rounded(self) -> Counter[str]:
        """Kinds of operators of the largest graph whose float32 results are rounded to bfloat16 -> how many of each."""
        return (self._programs or self.backend).rounded

    def all_reduce(self) -> ops.AllReduce | None:
        """The operator that sums over all ranks, for use in a graph; None on one device."""
        return self.backend.all_reduce()

    def prepare(self, cell: nn.Cell, *inputs: Tensor) -> None:
        """Compile `cell` for inputs of these shapes and types; otherwise `run` does so on its first call."""
        self.backend_of(cell).prepare(cell, inputs)

    def run(self, cell: nn.Cell, *inputs: Tensor) -> Any:
        """Call `cell`, a Cell around a parallelized network, with the full batch."""
        return self.backend_of(cell).run(cell, inputs)

    def backend_of(self, cell: nn.Cell) -> Backend:
        """The backend that runs `cell`: on one CPU device a `Program` for bfloat16, of which MindSpore has few CPU kernels,
        and for the training step of a large model of this package.

        Raises:
            ConfigError: it is in bfloat16 on a GPU, for which MindSpore has no kernels.
        """
        if self.target == "Ascend" or self.partitions_itself:
            return self.backend
        if cell not in self._is_program:
            self._is_program[cell] = self._needs_program(cell)
        if not self._is_program[cell]:
            return self.backend
        self._programs = self._programs or CpuProcesses.join(self.strategy)
        return self._programs

    def _needs_program(self, cell: nn.Cell) -> bool:
        dtypes = {getattr(each, "dtype", None) for _, each in cell.cells_and_names()} - {None}
        if ms.bfloat16 in dtypes and self.target == "GPU":
            raise ConfigError("bfloat16: MindSpore has no kernels for GPUs; give --compute-dtype float16 or float32")
        is_step_of_ours = self.target == "CPU" and cell.training and bool(dtypes)
        return ms.bfloat16 in dtypes or (is_step_of_ours and sum(p.size for p in cell.get_parameters()) >= LARGE)

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        """Broadcast the array of rank `source`; all ranks pass an array of the same shape and dtype."""
        return self.backend.broadcast(array, source)

    def broadcast_value(self, value: Any, source: int) -> Any:
        """Broadcast a JSON-serializable value of rank `source`; values of other ranks are ignored."""
        return self.backend.broadcast_value(value, source)

    def max_over_ranks(self, value: int) -> int:
        """Maximum of a value over all ranks, on every rank."""
        return self.backend.max_over_ranks(value)

    def sum_over_ranks(self, value: float) -> float:
        """Sum of a value over all ranks, on every rank."""
        return self.backend.sum_over_ranks(value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.backend.barrier()

    def refresh(self, net: nn.Cell, report: Report) -> None:
        """Broadcast the trained values of parameters shared by several pipeline stages to all of these stages, before a
        network that shares them runs alone."""
        mesh, held = self.strategy.mesh, {parameter.name: parameter for parameter in net.get_parameters()}
        for name in report.tied:
            parameter, of = held[name], report.of(name)
            for place, source in enumerate(mesh.ranks_of_stage(of.stage)):
                mine = tuple(parameter.shape) == of.local_shape
                array = parameter.asnumpy() if mine else np.zeros(of.local_shape, np.float32)
                trained = self.broadcast(array.copy(), source)
                if mine and self.rank != source and self.rank % mesh.stage_size == place:
                    parameter.set_data(Tensor(trained, dtype=parameter.dtype), slice_shape=parameter.sliced)

    def slice_to_write(self, name: str, parameter: ParameterReport) -> TensorSlice | None:
        """This rank's shard of a parameter or optimizer state, if this rank writes the shard.

        The first of the ranks that replicate a shard writes it; None for all others.
        """
        shape, mesh = parameter.global_shape, self.strategy.mesh
        if mesh.size == 1:
            return TensorSlice.full(shape)
        layout = self.backend.layouts.get(name)
        if layout is None or mesh.coordinate(self.rank, "pp") != parameter.stage:
            return None
        ranks_of_stage = mesh.ranks_of_stage(parameter.stage)
        own = layout.operator_slice(shape, self.rank)
        holders = [rank for rank in ranks_of_stage if layout.operator_slice(shape, rank) == own]
        groups = self.backend.groups
        group = groups[layout.optimizer_group] if layout.optimizer_group else [self.rank]
        return layout.stored_slice(shape, self.rank, groups) if min(holders) in group else None

    def held_slice(self, name: str, global_shape: tuple[int, ...]) -> TensorSlice | None:
        """This rank's shard of a parameter or optimizer state; None if it has none."""
        if self.strategy.mesh.size == 1:
            return TensorSlice.full(global_shape)
        layout = self.backend.layouts.get(name)
        return layout.stored_slice(global_shape, self.rank, self.backend.groups) if layout else None

    def holds_now(self, parameter: Parameter, global_shape: tuple[int, ...]) -> bool:
        """Whether this rank has the current value of a parameter or of its shard: in a pipeline, stages that compute
        with it do."""
        if self.strategy.mesh.pp == 1:
            return True
        return self.held_slice(parameter.name, global_shape) is not None and self.backend.is_current(parameter)

    def close(self) -> None:
        """Leave the job gracefully; also called when the process exits."""
        for backend in filter(None, (self._programs, self.backend)):
            backend.close()
