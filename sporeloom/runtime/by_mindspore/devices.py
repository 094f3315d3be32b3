# SPDX-License-Identifier: Apache-2.0
"""Ascend or GPU devices for which MindSpore shards graphs and communicates."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor, nn, ops
from mindspore.communication import get_process_group_ranks

from sporeloom.core.errors import Problems
from sporeloom.mindspore_compat.names import cell_graph_executor, mind_ir
from sporeloom.runtime.by_mindspore.context import set_auto_parallel_context
from sporeloom.runtime.by_mindspore.graph_checks import check_graph, groups_in
from sporeloom.runtime.by_mindspore.layouts import check_layouts, read_layouts
from sporeloom.runtime.device_backend import DeviceBackend, meet
from sporeloom.strategy.config import Strategy


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
        compiled = read_layouts(cell.parameter_layout_dict)
        for layout in compiled.values():
            if layout.optimizer_group and layout.optimizer_group not in self.groups:
                self.groups[layout.optimizer_group] = get_process_group_ranks(layout.optimizer_group)
        check_layouts(cell, compiled, self.groups, self.rank, self.strategy.source)
        self.layouts |= compiled

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
