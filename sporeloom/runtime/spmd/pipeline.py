# SPDX-License-Identifier: Apache-2.0
"""Runs the passes of pipeline stages over microbatches in the order of a schedule, or without stages.

The graphs do not depend on the number of microbatches: each stage has one for every pass through a part of the model, and one
that updates its parameters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from sporeloom.partition.graph import Name, TensorType
from sporeloom.partition.sharded_graph import item_size
from sporeloom.partition.stages import PassGraph, StageGraphs, StagePass
from sporeloom.runtime.spmd.rank_graph import RankGraph
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.schedule import part_of_model, passes, split_passes

Array = NDArray[Any]


class RankProgram(Protocol):
    """A graph that this rank can run."""

    graph: RankGraph

    @property
    def graphs(self) -> Sequence[RankGraph]: ...

    def compile(self, inputs: Sequence[Tensor]) -> None: ...

    def run(self, inputs: Sequence[Tensor]) -> Any: ...


class Exchange(Protocol):
    """Communication of values between stages, and sums of results: on CPU processes or on devices."""

    @property
    def rank(self) -> int: ...

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Prepare messages between pairs of ranks, (source, target). All ranks call it at the same point."""

    def send(self, peer: int, tag: tuple[str, Name, int], value: Tensor, type: TensorType) -> None:
        """Send `value` without waiting for its receiver."""

    def receive(self, peer: int, tag: tuple[str, Name, int], type: TensorType) -> Tensor:
        """Receive the next value of `peer`; values are sent in the order in which they are received."""
        ...

    def settle(self) -> None:
        """Wait until sent tensors may be overwritten."""

    def zeros(self, type: TensorType) -> Tensor: ...

    def add(self, total: Any, value: Tensor) -> Any:
        """Add a result to a sum; `total`: None, or the value that this method returned before."""
        ...

    def larger(self, total: Any, value: Tensor) -> Any:
        """The larger of each entry of two results; as `add`."""
        ...

    def sum_of(self, total: Any) -> Tensor: ...

    def join(self, values: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate results."""
        ...

    def broadcast(self, value: Any, type: TensorType, ranks: Sequence[int], source: int, tag: Any) -> Tensor:
        """Broadcast a sum of results from the rank at position `source` of `ranks` to all of them."""
        ...


class StagePrograms:
    """The passes of this rank's stage, ready to run, and the values sent between stages.

    Args:
        cut: the graph of all stages.
        programs: the passes of this stage.
        types: local types of all values.
        name: name that distinguishes the messages of several graphs.
        keep_each: indices of results that are kept for each microbatch; all others are summed.
    """

    def __init__(
        self,
        strategy: Strategy,
        cut: StageGraphs,
        programs: Mapping[StagePass, RankProgram],
        types: Mapping[Name, TensorType],
        exchange: Exchange,
        name: str,
        keep_each: Collection[int] = (),
    ):
        self.strategy, self.cut, self.programs, self.types = strategy, cut, programs, types
        self.exchange, self.name, self.keep_each = exchange, name, keep_each
        self.maxima: Collection[int] = ()
        """Indices of results of which the largest over microbatches is kept."""
        self.stage = strategy.mesh.coordinate(exchange.rank, "pp")
        mine = [one for one in cut.passes if self.stage_of(one) == self.stage]
        self._uses = Counter(value for one in mine for value in cut.passes[one].taken if value not in cut.kept)
        self._results: dict[Name, list[int]] = {}
        for position, shares in enumerate(cut.results):
            for value in shares.values():
                self._results.setdefault(value, []).append(position)
        self._values: dict[tuple[Name, int], tuple[Tensor, int]] = {}
        """(value, microbatch) -> its tensor, and the number of passes that will still read it."""
        self._kept: dict[Name, Tensor] = {}
        """Values that depend on parameters alone, kept until the end of a step."""
        self._coming: dict[int, deque[tuple[Name, int]]] = {}
        """Stage -> values that it has yet to send to this stage, in order."""
        exchange.connect((self.peer(giver), self.peer(taker)) for giver, taker in self._stage_pairs())

    def stage_of(self, one: StagePass) -> int:
        return self.strategy.stage_of_part(one.part)

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Let MindSpore select the kernels for inputs of these shapes and types."""
        for one, program in self.programs.items():
            graph = self.cut.passes[one]
            taken = (self.exchange.zeros(self.types[name]) for name in graph.taken)
            program.compile([*self._network_inputs(graph, inputs), *taken])

    def begin(self, passes_of: Callable[[int], Iterable[tuple[StagePass, int]]]) -> None:
        """Begin a run: derive the values that each other stage will send from the order of its passes, and gather the
        parameters that are gathered once for all microbatches."""
        givers = {giver for giver, taker in self._stage_pairs() if taker == self.stage}
        self._coming = {giver: deque(self.sent(giver, self.stage, passes_of(giver))) for giver in givers}
        for one, program in self.programs.items():
            if one.kind == "parameters":
                given = program.run([])
                outputs = given if isinstance(given, (tuple, list)) else (given,)
                self._kept |= zip(self.cut.passes[one].given, outputs, strict=True)

    def sent(self, giver: int, taker: int, done: Iterable[tuple[StagePass, int]]) -> Iterator[tuple[Name, int]]:
        """Values and microbatches that a stage sends to another while it runs these passes."""
        for one, microbatch in done:
            for name in self.cut.passes[one].given if one in self.cut.passes else ():
                if taker in self._takers(name):
                    yield name, microbatch

    def end(self) -> None:
        """End a run."""
        assert not self.held and not any(self._coming.values()), "values that no pass took"
        self._kept.clear()
        self.exchange.settle()

    def _takers(self, name: Name) -> set[int]:
        """The other stages that read a value."""
        if name in self.cut.kept:
            return set()
        giver = self.stage_of(self.cut.givers[name])
        return {self.stage_of(taker) for taker in self.cut.takers.get(name, ())} - {giver}

    def _stage_pairs(self) -> list[tuple[int, int]]:
        """Pairs of stages that communicate: (giver, taker)."""
        found = {
            (self.stage_of(one), to)
            for one in self.cut.passes
            for name in self.cut.passes[one].given
            for to in self._takers(name)
        }
        return sorted(found)

    def run(self, one: StagePass, microbatch: int, inputs: Sequence[Tensor], results: dict[int, Any]) -> None:
        """Run one pass: receive its inputs from other stages and send its outputs to them. Its results are added to
        `results` by index, or kept there for each microbatch."""
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
                if position in self.keep_each:
                    results.setdefault(position, {})[microbatch] = value
                elif position in self.maxima:
                    results[position] = self.exchange.larger(results.get(position), value)
                else:
                    results[position] = self.exchange.add(results.get(position), value)

    @staticmethod
    def _network_inputs(graph: PassGraph, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [inputs[position] for position in graph.network_inputs]

    def _take(self, name: Name, microbatch: int) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        key, giver = (name, microbatch), self.stage_of(self.cut.givers[name])
        while key not in self._values:  # values are received in the order in which they are sent
            early, of = self._coming[giver].popleft()
            value = self.exchange.receive(self.peer(giver), (self.name, early, of), self.types[early])
            self._values[early, of] = value, self._uses[early]
        value, left = self._values.pop(key)
        if left > 1:
            self._values[key] = value, left - 1
        return value

    def _give(self, name: Name, microbatch: int, value: Tensor) -> None:
        if any(self.stage_of(taker) == self.stage for taker in self.cut.takers.get(name, ())):
            self._values[name, microbatch] = value, self._uses[name]
        for stage in sorted(self._takers(name)):
            self.exchange.send(self.peer(stage), (self.name, name, microbatch), value, self.types[name])

    def peer(self, stage: int) -> int:
        """The rank at the same position in another stage."""
        return self.exchange.rank + (stage - self.stage) * self.strategy.mesh.stage_size

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other stages for each microbatch."""
        total = 0
        for one in self.programs:
            for name in self.cut.passes[one].given:
                type = self.types[name]
                total += len(self._takers(name)) * type.num_elements * item_size(type.dtype)
        return total

    @property
    def held(self) -> int:
        """Number of values that wait to be read by a pass."""
        return len(self._values)


class Schedule:
    """The passes of a stage over all microbatches, in the order of the strategy's schedule."""

    def __init__(self, programs: StagePrograms, num_microbatches: int):
        self.programs, self.num_microbatches = programs, num_microbatches
        self._order = list(self.passes_of(programs.stage))

    def run(self, microbatches: Sequence[Sequence[Tensor]]) -> dict[int, Any]:
        """Run all microbatches, given the network's inputs for each. Returns the results of this stage by index."""
        results = dict[int, Any]()
        self.programs.begin(self.passes_of)
        for one, microbatch in self._order:
            self.programs.run(one, microbatch, microbatches[microbatch], results)
        self.programs.end()
        return results

    def passes_of(self, stage: int) -> Iterator[tuple[StagePass, int]]:
        """The passes of a stage in a step, each with its microbatch."""
        pipeline, mesh = self.programs.strategy.pipeline, self.programs.strategy.mesh
        order = passes(stage, mesh.pp, self.num_microbatches, pipeline.virtual_stages, pipeline.order)
        split = split_passes(order)
        for one in order:
            part = part_of_model(one.part, stage, mesh.pp, pipeline.order)
            yield StagePass(one.kind, part), one.microbatch
            if one.kind == "backward" and one not in split:
                yield StagePass("weights", part), one.microbatch


class ScheduledStep:
    """A training step: all microbatches, then the update."""

    def __init__(
        self,
        programs: StagePrograms,
        update: RankProgram,
        update_inputs: Sequence[int],
        types: Sequence[TensorType],
        num_microbatches: int,
    ):
        self.programs, self.update = programs, update
        self.schedule = Schedule(programs, num_microbatches)
        self.update_inputs, self.types = update_inputs, types
        self.order: Sequence[int] = range(num_microbatches)
        """Rows of the batch, counted in microbatches, that each microbatch of the schedule reads."""

    def compile(self, inputs: Sequence[Tensor]) -> None:
        self.programs.compile(next(self._microbatches(inputs)))
        self.update.compile([self.programs.exchange.zeros(self.types[position]) for position in self.update_inputs])

    @property
    def graphs(self) -> Sequence[RankGraph]:
        return [*(program.graph for program in self.programs.programs.values()), self.update.graph]

    def run(self, inputs: Sequence[Tensor]) -> Any:
        results, exchange = self.schedule.run(list(self._microbatches(inputs))), self.programs.exchange
        return self.update.run(
            [
                exchange.sum_of(results[position]) if position in results else exchange.zeros(self.types[position])
                for position in self.update_inputs
            ]
        )

    def _microbatches(self, inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        arrays = [each.asnumpy() for each in inputs]
        rows = len(arrays[0]) // self.schedule.num_microbatches
        for i in self.order:
            yield [Tensor(np.ascontiguousarray(array[i * rows : (i + 1) * rows])) for array in arrays]


class ForwardStages:
    """A Cell without gradients, computed stage after stage. Its results are broadcast to all ranks."""

    def __init__(self, programs: StagePrograms, num_parts: int):
        self.programs, self.num_parts = programs, num_parts

    def compile(self, inputs: Sequence[Tensor]) -> None:
        self.programs.compile(inputs)

    @property
    def graphs(self) -> Sequence[RankGraph]:
        return [program.graph for program in self.programs.programs.values()]

    def run(self, inputs: Sequence[Tensor]) -> Any:
        programs, results = self.programs, dict[int, Any]()
        programs.begin(self.passes_of)
        for part in range(self.num_parts):
            programs.run(StagePass("forward", part), 0, inputs, results)
        programs.end()
        ranks, outputs = [programs.peer(stage) for stage in range(programs.strategy.mesh.pp)], []
        for position, shares in enumerate(programs.cut.results):
            ((part, name),) = shares.items()
            source, tag = programs.strategy.stage_of_part(part), (programs.name, "output", position)
            value, type = results.get(position), programs.types[name]
            outputs.append(programs.exchange.broadcast(value, type, ranks, source, tag))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def passes_of(self, stage: int) -> Iterator[tuple[StagePass, int]]:
        """The parts of a stage in order."""
        for part in range(self.num_parts):
            if self.programs.strategy.stage_of_part(part) == stage:
                yield StagePass("forward", part), 0
