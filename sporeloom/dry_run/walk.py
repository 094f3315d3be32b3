# SPDX-License-Identifier: Apache-2.0
"""A step of one rank, run through the runtime's own schedule with something else in place of tensors and programs.

`sporeloom.runtime.spmd.pipeline` takes, keeps, sends and sums values on CPU processes and devices. What a report puts in
their place is driven by the same code, so it sees the same passes, messages and sums in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from sporeloom.dry_run.partitioned import Partitioned
from sporeloom.partition.graph import Graph, Name, TensorType
from sporeloom.partition.stages import PassGraph, PassKind, StagePass
from sporeloom.runtime.spmd.pipeline import ForwardStages, Schedule, StagePrograms
from sporeloom.runtime.spmd.step_graphs import types_of

PHASE_OF_PASS: dict[PassKind, str] = {
    "parameters": "forward",
    "forward": "forward",
    "backward": "backward",
    "weights": "backward",
}
NOTHING = TensorType((0,), "float32")


class StepWalk(ABC):
    """A step of one rank.

    Args:
        exchange: stands for the communication between stages (`runtime.spmd.pipeline.Exchange`).
    """

    def __init__(self, partitioned: Partitioned, rank: int, exchange: Any):
        self.partitioned, self.rank, self.exchange = partitioned, rank, exchange
        self.strategy, self.cut = partitioned.strategy, partitioned.cut.stages
        self.stage = self.strategy.mesh.coordinate(rank, "pp")

    @abstractmethod
    def inputs(self, types: Mapping[Name, TensorType]) -> list[Any]:
        """Make what stands for inputs of these types."""

    @property
    def passes_of_stage(self) -> dict[StagePass, PassGraph]:
        return {
            one: made for one, made in self.cut.passes.items() if self.strategy.stage_of_part(one.part) == self.stage
        }

    def stages(self, programs: Mapping[StagePass, Any], known: Mapping[Name, TensorType]) -> StagePrograms | None:
        """The passes of the stage as the runtime drives them; None if there is one graph for everything.

        Args:
            programs: what stands for the graph of each pass (`runtime.spmd.pipeline.RankProgram`).
            known: local types of values.
        """
        if not self.cut.results:
            return None
        types = dict(known)
        for made in self.cut.passes.values():
            types |= types_of(made.graph)
        joined = set(range(len(self.cut.results))) - set(self.partitioned.summed) if self._is_custom else ()
        return StagePrograms(self.strategy, self.cut, programs, types, self.exchange, "recorded", joined)

    def run_passes(self, stages: StagePrograms) -> dict[int, Any]:
        """Run the passes of the stage in the order of the schedule. Returns its results by index."""
        num_passes = self.partitioned.num_passes
        microbatches: Any = [self._network_inputs() for _ in range(num_passes)]
        if self.partitioned.trained:
            return Schedule(stages, num_passes).run(microbatches)
        forward, results = ForwardStages(stages, 1 + max(one.part for one in self.cut.passes)), dict[int, Any]()
        stages.begin(forward.passes_of)
        for part in range(forward.num_parts):
            stages.run(StagePass("forward", part), 0, microbatches[0], results)
        stages.end()
        return results

    def run_whole(self, programs: Mapping[StagePass, Any]) -> Any:
        """Run a step in one graph, or nothing before the update."""
        for one, program in programs.items():
            return program.run(self.inputs(self.cut.passes[one].graph.inputs))
        return {}

    def update_inputs(self, graph: Graph, results: Mapping[int, Any]) -> list[Any]:
        """The inputs of the update: sums over microbatches, and inputs of the network."""
        update, exchange = self.partitioned.update, self.exchange
        assert update is not None
        whole = update.sharded.source.inputs
        if self._is_custom:
            sums = iter([exchange.sum_of(results[i]) for i in self.partitioned.summed if i in results])
            inputs = self.inputs({name: whole.get(name, NOTHING) for name in graph.inputs})
            names = zip(inputs, graph.inputs, strict=True)
            return [each if name in whole else next(sums, each) for each, name in names]
        positions = {name: position for position, name in enumerate(whole)}
        wanted = ((positions[name], type) for name, type in graph.inputs.items())
        return [exchange.sum_of(results[i]) if i in results else exchange.zeros(type) for i, type in wanted]

    @property
    def _is_custom(self) -> bool:
        """Whether passes and update are divided from one graph."""
        update = self.partitioned.update
        return update is not None and update.sharded is self.partitioned.cut.sharded

    def _network_inputs(self) -> list[Any]:
        """The inputs of a microbatch."""
        found: dict[int, TensorType] = {}
        for made in self.cut.passes.values():
            found |= zip(made.network_inputs, made.graph.inputs.values(), strict=False)
        return self.inputs({f"input {i}": found.get(i, NOTHING) for i in range(1 + max(found, default=-1))})
