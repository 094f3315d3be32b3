# SPDX-License-Identifier: Apache-2.0
"""Ascend or GPU devices for which MindSpore partitions and communicates.

`native_spmd` is the backend of devices that run this package's own graphs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_process_group_ranks, get_rank, init
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError, Problems
from sporeloom.mindspore_compat.names import cell_graph_executor, mind_ir
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.backend import Backend
from sporeloom.runtime.compiler import set_auto_parallel_context
from sporeloom.runtime.graph_checks import check_graph, groups_in
from sporeloom.runtime.layouts import derived_in, learn_from, read_layouts
from sporeloom.strategy.checks import launch_problems
from sporeloom.strategy.config import Strategy


def meet(strategy: Strategy) -> int:
    """Join the other processes of a job on devices. Returns this process's rank; MindSpore's scheduler exits here.

    Raises:
        ConfigError: the number of processes differs from the ranks of the strategy's mesh.
    """
    init()
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        sys.exit(0)  # inside the exit, MindSpore's scheduler waits for the workers
    if get_group_size() != strategy.mesh.size:
        raise ConfigError(launch_problems(strategy, get_group_size()))
    if strategy.offload:
        ms.set_context(memory_optimize_level="O0")  # required for offloading to the host
    return int(get_rank())


class DeviceBackend(Backend):
    """One of several devices: communication between the processes of a job on devices."""

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        result: NDArray[Any] = ops.Broadcast(source)((Tensor(array),))[0].asnumpy()
        return result

    def share(self, value: Any, source: int) -> Any:
        return json.loads(self.share_bytes(json.dumps(value).encode(), source))

    def share_bytes(self, content: bytes, source: int) -> bytes:
        """Broadcast the content of rank `source`; that of other ranks is ignored."""
        length = int(self.broadcast(np.asarray([len(content)], np.int32), source)[0])
        padded = np.zeros(max(1024, 1 << (length - 1).bit_length()), np.uint8)  # few lengths: each is compiled once
        if self.rank == source:
            padded[:length] = np.frombuffer(content, np.uint8)
        return self.broadcast(padded.view(np.int32), source).tobytes()[:length]

    def largest(self, value: int) -> int:
        return int(ops.AllReduce(ops.ReduceOp.MAX)(Tensor([value], ms.int32)).asnumpy()[0])

    def total(self, value: float) -> float:
        return float(ops.AllReduce()(Tensor([value], ms.float32)).asnumpy()[0])


class Devices(DeviceBackend):
    """One of several devices, for which MindSpore partitions graphs."""

    @classmethod
    def join(cls, strategy: Strategy) -> Devices:
        """Join the other processes of the job.

        Raises:
            ConfigError: the number of processes differs from the ranks of the strategy's mesh.
        """
        rank = meet(strategy)
        set_auto_parallel_context(strategy, rank)
        return cls(strategy, rank)

    def prepare(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> None:
        self.look_at(cell, inputs)
        self.layouts |= read_layouts(cell.parameter_layout_dict)
        for layout in self.layouts.values():
            if layout.optimizer_group and layout.optimizer_group not in self.groups:
                self.groups[layout.optimizer_group] = get_process_group_ranks(layout.optimizer_group)
        source = self.strategy.source
        if learn_from(cell, self.layouts, self.groups, self.rank, source) and isinstance(cell, TrainStep):
            raise ConfigError(
                f"{source}: MindSpore sharded parameters that no rule is for, so the norm of the gradients would be wrong; "
                f"write rules for {', '.join(derived_in(cell))}"
            )

    def look_at(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> None:
        """Compile `cell`, and validate the graph against the computation of one device.

        Raises:
            ConfigError: it computes something else, on this rank or another.
        """
        cell.compile(*inputs)
        executor, phase = cell_graph_executor._graph_executor, cell.current_phase
        model = mind_ir.ModelProto.FromString(executor.get_func_graph_proto(phase, "mind_ir", False))
        groups = {name: get_process_group_ranks(name) for name in groups_in(model)}
        problems = Problems()
        problems.of(check_graph, model, executor.get_strategy(phase), groups, cell, self.strategy.source)
        self.agree(problems)

    def all_reduce(self) -> ops.AllReduce | None:
        return ops.AllReduce()
