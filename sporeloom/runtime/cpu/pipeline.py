# SPDX-License-Identifier: Apache-2.0
"""Runs a Cell microbatch by microbatch through the stages of a pipeline, as a schedule says; or without stages.

The graphs do not depend on the number of microbatches: each stage has one for every pass through a part of the model, and
one that updates its parameters.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from sporeloom.partition.graph import Name, TensorType
from sporeloom.partition.held import item_size
from sporeloom.partition.stages import PassGraph, StageGraphs, StagePass
from sporeloom.runtime.cpu.executor import Program
from sporeloom.runtime.cpu.find_nan import NanFinder
from sporeloom.runtime.cpu.partition import PartitionedGraph
from sporeloom.runtime.cpu.transport import Collectives, Transport
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.listed_schedule import Pass
from sporeloom.strategy.schedule import part_of_model, passes, split_passes

Array = NDArray[Any]


class StagePrograms:
    """The passes of this rank's stage, ready to run, and what travels between them.

    Args:
        cut: the graph of all stages.
        programs: the passes of this stage.
        types: of the values that passes give each other, as this rank holds them.
        name: keeps messages of several graphs apart.
    """

    def __init__(
        self,
        strategy: Strategy,
        cut: StageGraphs,
        programs: Mapping[StagePass, Program],
        types: Mapping[Name, TensorType],
        transport: Transport,
        name: str,
        nan_finder: NanFinder | None = None,
    ):
        self.strategy, self.cut, self.programs, self.types = strategy, cut, programs, types
        self.transport, self.name, self.nan_finder = transport, name, nan_finder
        self.stage = strategy.mesh.coordinate(transport.rank, "pp")
        mine = [one for one in cut.passes if self.stage_of(one) == self.stage]
        self._uses = Counter(value for one in mine for value in cut.passes[one].taken if value not in cut.kept)
        self._results: dict[Name, list[int]] = {}
        for position, shares in enumerate(cut.results):
            for value in shares.values():
                self._results.setdefault(value, []).append(position)
        self._values: dict[tuple[Name, int], tuple[Tensor, int]] = {}
        """Value, microbatch -> what it is, and how many passes have yet to take it."""
        self._kept: dict[Name, Tensor] = {}
        """Values of parameters alone, until a step has ended."""

    def stage_of(self, one: StagePass) -> int:
        return self.strategy.stage_of_part(one.part)

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Let MindSpore choose the kernels, for inputs like these."""
        for one, program in self.programs.items():
            graph = self.cut.passes[one]
            program.compile([*self._network_inputs(graph, inputs), *(_zeros(self.types[name]) for name in graph.taken)])

    @contextlib.contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Within it there are the values that are gathered of parameters once for all microbatches."""
        for one, program in self.programs.items():
            if one.kind == "parameters":
                given = program.run([])
                outputs = given if isinstance(given, (tuple, list)) else (given,)
                self._kept |= zip(self.cut.passes[one].given, outputs, strict=True)
        try:
            yield
        finally:
            self._kept.clear()

    def run(self, one: StagePass, microbatch: int, inputs: Sequence[Tensor], results: dict[int, Array]) -> None:
        """One pass: take what it needs, from other stages if need be, and give others what they need. What it adds to the
        results is added to `results`, by position."""
        program = self.programs.get(one)
        if program is None:
            return
        graph = self.cut.passes[one]
        taken = [self._take(name, microbatch) for name in graph.taken]
        given = program.run([*self._network_inputs(graph, inputs), *taken])
        outputs = given if isinstance(given, (tuple, list)) else (given,)
        for name, value in zip(graph.given, outputs, strict=True):
            self._give(name, microbatch, value)
            for position in self._results.get(name, ()):
                array = value.asnumpy()
                results[position] = results[position] + array if position in results else array.copy()

    @staticmethod
    def _network_inputs(graph: PassGraph, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [inputs[position] for position in graph.network_inputs]

    def _take(self, name: Name, microbatch: int) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        key, giver = (name, microbatch), self.stage_of(self.cut.givers[name])
        if key not in self._values:
            received = self._receive(giver, name, microbatch)
            if self.nan_finder:
                self.nan_finder.receive(received)
            value = Tensor(received)
            self._values[key] = value, self._uses[name]
        value, left = self._values.pop(key)
        if left > 1:
            self._values[key] = value, left - 1
        return value

    def _give(self, name: Name, microbatch: int, value: Tensor) -> None:
        stages = {self.stage_of(taker) for taker in self.cut.takers.get(name, ())}
        if self.stage in stages:
            self._values[name, microbatch] = value, self._uses[name]
        array = value.asnumpy() if stages - {self.stage} else None
        if array is not None and self.types[name].dtype == "bfloat16":
            array = array.astype(ml_dtypes.bfloat16)
        for stage in sorted(stages - {self.stage}):
            assert array is not None
            self.transport.send(self.peer(stage), (self.name, name, microbatch), array)

    def _receive(self, stage: int, name: Name, microbatch: int) -> Array:
        def receive(_: Array) -> Array:
            array: Array = self.transport.receive(self.peer(stage), (self.name, name, microbatch))
            return array

        what = f"Receive of microbatch {microbatch} from stage {stage}, rank {self.peer(stage)}"
        array = self.transport.watched(what, receive)(np.zeros(0))
        return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array

    def peer(self, stage: int) -> int:
        """The rank at this one's place in another stage."""
        return self.transport.rank + (stage - self.stage) * self.strategy.mesh.stage_size

    @property
    def sent_bytes(self) -> int:
        """That this rank sends to other stages for each microbatch."""
        total = 0
        for one in self.programs:
            for name in self.cut.passes[one].given:
                stages = {self.stage_of(taker) for taker in self.cut.takers.get(name, ())} - {self.stage}
                type = self.types[name]
                total += len(stages) * type.num_elements * item_size(type.dtype)
        return total

    @property
    def held(self) -> int:
        """Values that wait for a pass."""
        return len(self._values)


class ScheduledStep:
    """A training step: passes over all microbatches in the order of the strategy's schedule, then the update."""

    def __init__(
        self,
        programs: StagePrograms,
        update: Program,
        update_inputs: Sequence[int],
        types: Sequence[TensorType],
        num_microbatches: int,
    ):
        self.programs, self.update, self.num_microbatches = programs, update, num_microbatches
        self.update_inputs, self.types = update_inputs, types
        pipeline, mesh = programs.strategy.pipeline, programs.strategy.mesh
        self.order = passes(programs.stage, mesh.pp, num_microbatches, pipeline.virtual_stages, pipeline.order)
        self._split = split_passes(self.order)

    def compile(self, inputs: Sequence[Tensor]) -> None:
        self.programs.compile(next(self._microbatches(inputs)))
        self.update.compile([_zeros(self.types[position]) for position in self.update_inputs])

    @property
    def graphs(self) -> Sequence[PartitionedGraph]:
        return [*(program.graph for program in self.programs.programs.values()), self.update.graph]

    def run(self, inputs: Sequence[Tensor]) -> Any:
        microbatches, results = list(self._microbatches(inputs)), dict[int, Array]()
        with self.programs.gathered_parameters():
            for one in self.order:
                for stage_pass in self._stage_passes(one):
                    self.programs.run(stage_pass, one.microbatch, microbatches[one.microbatch], results)
        assert not self.programs.held, "values that no pass took"
        sums = [
            Tensor(results[position]) if position in results else _zeros(self.types[position])
            for position in self.update_inputs
        ]
        return self.update.run(sums)

    def _stage_passes(self, one: Pass) -> Iterable[StagePass]:
        mesh, schedule = self.programs.strategy.mesh, self.programs.strategy.pipeline.order
        part = part_of_model(one.part, self.programs.stage, mesh.pp, schedule)
        yield StagePass(one.kind, part)
        if one.kind == "backward" and one not in self._split:
            yield StagePass("weights", part)

    def _microbatches(self, inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        arrays = [each.asnumpy() for each in inputs]
        rows = len(arrays[0]) // self.num_microbatches
        for i in range(self.num_microbatches):
            yield [Tensor(np.ascontiguousarray(array[i * rows : (i + 1) * rows])) for array in arrays]


class ForwardStages:
    """A Cell without gradients, computed stage after stage. All ranks know what it returns."""

    def __init__(self, programs: StagePrograms, num_parts: int):
        self.programs, self.num_parts = programs, num_parts

    def compile(self, inputs: Sequence[Tensor]) -> None:
        self.programs.compile(inputs)

    @property
    def graphs(self) -> Sequence[PartitionedGraph]:
        return [program.graph for program in self.programs.programs.values()]

    def run(self, inputs: Sequence[Tensor]) -> Any:
        results: dict[int, Array] = {}
        with self.programs.gathered_parameters():
            for part in range(self.num_parts):
                self.programs.run(StagePass("forward", part), 0, inputs, results)
        mesh, outputs = self.programs.strategy.mesh, []
        for position, shares in enumerate(self.programs.cut.results):
            (part,) = shares
            source = self.programs.strategy.stage_of_part(part)
            ranks = [self.programs.peer(stage) for stage in range(mesh.pp)]
            group = Collectives(self.programs.transport, ranks, (self.programs.name, "output", position))
            outputs.append(Tensor(group.broadcast(results.get(position, np.zeros(0)), source)))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _zeros(type: TensorType) -> Tensor:
    return Tensor(np.zeros(type.shape, np.float32 if type.dtype == "bfloat16" else type.dtype))
