# SPDX-License-Identifier: Apache-2.0
"""CPU processes that share one graph, which the first of them compiles for one device, and shard it themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mindspore import nn

from sporeloom.errors import Problems
from sporeloom.parallel.call import Call
from sporeloom.partition.graph import Graph
from sporeloom.partition.held import ShardedGraph
from sporeloom.private_names import mind_ir
from sporeloom.runtime.cpu.kept_graphs import kept_model
from sporeloom.runtime.cpu.partition import PartitionedGraph
from sporeloom.runtime.cpu.processes import CpuProcesses
from sporeloom.runtime.cpu.spmd import compile_for_one_device, decide, partition_for_rank, whole_again
from sporeloom.runtime.cpu.transport import Collectives
from sporeloom.strategy.layout import Shape


class SpmdProcesses(CpuProcesses):
    """One of the CPU processes of a job. Of a Cell all of them compute what one device does, by construction."""

    compiles_for_all = True

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.sharded: list[ShardedGraph] = []
        """What each program sends and computes whole, in their order; their graphs are not kept."""
        self._shapes: dict[int, Shape] = {}
        """Whole shapes of the parameters of all programs, by id: these keep them."""

    def _checked(
        self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]], trainable: Collection[str]
    ) -> PartitionedGraph:
        model = self._one_devices_graph(cell, described)
        owners = {parameter.name: id(parameter) for parameter in cell.get_parameters()}
        names = {p.name.rpartition(":")[2]: tuple(p.dims) for p in model.graph.parameter}
        self._shapes |= {owners[name]: shape for name, shape in names.items() if name in owners}
        graph, sharded = partition_for_rank(model, decide(cell, self.strategy.mesh), self.rank)
        self.sharded.append(replace(sharded, graph=Graph({}, {}, [], []), layouts={}))
        self.told_of_graph = sharded.summary()
        return graph

    def _one_devices_graph(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
        """From rank 0, which reads or compiles it.

        Raises:
            ConfigError: it cannot be compiled.
        """
        problems, model = Problems(), None
        if self.rank == 0:
            with whole_again(cell.get_parameters(), self._shapes):
                model = problems.of(self._compiled_or_kept, cell, described)
        self.agree(problems)
        if isinstance(cell, Call):
            cell.structure = self.share(cell.take_structure() if self.rank == 0 else None, 0)
        group = Collectives(self.transport, range(self.strategy.mesh.size), "graph of one device")
        written = b"" if model is None else model.SerializeToString()
        content = group.broadcast(np.frombuffer(written, np.uint8), 0)
        return model if model is not None else mind_ir.ModelProto.FromString(content.tobytes())

    def _compiled_or_kept(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
        key = getattr(cell, "graph_key", None)
        if key is None:
            return compile_for_one_device(cell, described)
        inputs = [[list(shape), np.dtype(dtype).str] for shape, dtype in described]
        strategy, rules = self.strategy, self.strategy.rules  # what is marked in the network before it is compiled
        repeats = any(getattr(each, "repeats_heads", False) for _, each in cell.cells_and_names())
        marks = repr((strategy.recompute, strategy.offload, rules.layers, rules.selective, repeats))
        more = {"network": key, "one_device": True, "inputs": inputs, "training": cell.training, "marks": marks}
        return kept_model(more, lambda: compile_for_one_device(cell, described))

    def all_reduce(self) -> None:
        return None
