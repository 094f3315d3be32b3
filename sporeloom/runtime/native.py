# SPDX-License-Identifier: Apache-2.0
"""The Ascend or GPU devices of a job: MindSpore partitions for them and communicates between them."""

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

from sporeloom.errors import ConfigError, Problems
from sporeloom.parallel.step import TrainStep
from sporeloom.private_names import cell_graph_executor, mind_ir
from sporeloom.runtime.backend import Backend
from sporeloom.runtime.compiler import set_auto_parallel_context
from sporeloom.runtime.graph_checks import check_graph, groups_in
from sporeloom.runtime.layouts import derived_in, learn_from, read_layouts
from sporeloom.strategy.checks import launch_problems
from sporeloom.strategy.config import Strategy


class Devices(Backend):
    """One of several devices."""

    @classmethod
    def join(cls, strategy: Strategy) -> Devices:
        """Meet the other processes of the job. MindSpore's scheduler does not come back from here.

        Raises:
            ConfigError: there are more or fewer of them than the strategy's mesh has ranks.
        """
        init()
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            sys.exit(0)  # MindSpore's scheduler stays, inside the exit, until the workers are done
        if get_group_size() != strategy.mesh.size:
            raise ConfigError(launch_problems(strategy, get_group_size()))
        set_auto_parallel_context(strategy, get_rank())
        if strategy.offload:
            ms.set_context(memory_optimize_level="O0")  # which moving to the host and back wants
        return cls(strategy, get_rank())

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
        """Compile `cell`, and hold the graph against what one device computes.

        Raises:
            ConfigError: it is something else, on this rank or another.
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

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        result: NDArray[Any] = ops.Broadcast(source)((Tensor(array),))[0].asnumpy()
        return result

    def share(self, value: Any, source: int) -> Any:
        text = np.frombuffer(json.dumps(value).encode(), np.uint8).astype(np.int32)
        length = int(self.broadcast(np.asarray([len(text)], np.int32), source)[0])
        padded = np.zeros(max(1024, 1 << (length - 1).bit_length()), np.int32)  # few lengths: each is compiled once
        padded[: len(text) if self.rank == source else 0] = text if self.rank == source else ()
        return json.loads(self.broadcast(padded, source)[:length].astype(np.uint8).tobytes())

    def largest(self, value: int) -> int:
        return int(ops.AllReduce(ops.ReduceOp.MAX)(Tensor([value], ms.int32)).asnumpy()[0])

    def total(self, value: float) -> float:
        return float(ops.AllReduce()(Tensor([value], ms.float32)).asnumpy()[0])
