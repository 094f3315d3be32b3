# SPDX-License-Identifier: Apache-2.0
"""Runs a step of a partitioned program with storages in place of tensors, through the runtime's own schedule.

`sporeloom.runtime.spmd.pipeline` takes, keeps, sends and sums values on CPU processes and devices. Here it does so with
storages that record when Python frees them, so the record holds what the program holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sporeloom.dry_run.memory.labels import Label, cells_of, labels, of_parameter
from sporeloom.dry_run.memory.liveness import Order, lifetimes, num_bytes
from sporeloom.dry_run.memory.recorder import RecordedProgram, Recorder, Storage
from sporeloom.dry_run.memory.timeline import Timeline
from sporeloom.dry_run.partitioned import Partitioned
from sporeloom.dry_run.walk import PHASE_OF_PASS, StepWalk
from sporeloom.dry_run.work import phases_of
from sporeloom.partition.broadcasts import tile_broadcasts
from sporeloom.partition.graph import Graph, Name, TensorType
from sporeloom.partition.stages import PassGraph, StagePass
from sporeloom.runtime.spmd.step_graphs import types_of

MOMENTS = ("adam_m.", "adam_v.")
RECEIVED = "received from another stage"
ON_HOST = Label("gradient", "", "sums over microbatches in arrays of the host")


@dataclass(frozen=True)
class Platform:
    """Properties of the executor that determine what a rank holds."""

    on_cpus: bool = False
    """CPU processes hold bfloat16 in float32, sum gradients in arrays of the host, and copy them before the update."""
    tiles_broadcasts: bool = True
    """On CPUs: whether inputs that operators would broadcast are tiled; a small step of one process runs without."""
    order: Order = "breadth"

    @property
    def half_bytes(self) -> int:
        return 4 if self.on_cpus else 2


DEVICES = Platform()


@dataclass
class RecordedExchange:
    """Communication between stages: records received values and sums, and holds what is being sent as devices do."""

    recorder: Recorder
    rank: int
    platform: Platform
    sending: list[Storage] = field(default_factory=list)

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Do nothing: nobody is there."""

    def send(self, peer: int, tag: tuple[str, Name, int], value: Any, type: TensorType) -> None:
        if not self.platform.on_cpus:  # processes send a copy at once
            self.sending.append(value)

    def receive(self, peer: int, tag: tuple[str, Name, int], type: TensorType) -> Any:
        return self._tensor(type, Label("communication", "", RECEIVED))

    def settle(self) -> None:
        self.sending.clear()

    def zeros(self, type: TensorType) -> Any:
        return self._tensor(type, Label("gradient", "", "zeros for a gradient of another stage"))

    def add(self, total: Any, value: Any) -> Any:
        if total is None and not self.platform.on_cpus:
            return value
        size, label = self.recorder.sizes[value.number], self.recorder.labels[value.number]
        label = self.recorder.label(ON_HOST) if self.platform.on_cpus else label
        return Storage(self.recorder, self.recorder.allocate(size, label))

    def larger(self, total: Any, value: Any) -> Any:
        return self.add(total, value)

    def sum_of(self, total: Any) -> Any:
        return self.add(None, total) if self.platform.on_cpus else total

    def join(self, values: Any, dim: int) -> Any:
        """Concatenate results, which exist besides."""
        sizes = (self.recorder.sizes[value.number] for value in values)
        return self.recorder.tensor(sum(sizes), Label("temporary", "", "results of all microbatches"))

    def broadcast(self, value: Any, type: TensorType, ranks: Any, source: int, tag: Any) -> Any:
        return self._tensor(type, Label("communication", "", RECEIVED)) if value is None else value

    def _tensor(self, type: TensorType, label: Label) -> Storage:
        return self.recorder.tensor(num_bytes(type, self.platform.half_bytes), label)


class _Step(StepWalk):
    """A step of one rank."""

    def __init__(self, partitioned: Partitioned, rank: int, platform: Platform):
        self.platform, self.recorder = platform, Recorder()
        super().__init__(partitioned, rank, RecordedExchange(self.recorder, rank, platform))
        whole = partitioned.cut.sharded.result.graph
        self.cells, self.phases, self.types = cells_of(whole), phases_of(whole), types_of(whole)
        self.held: list[Storage] = []
        """Storages of the whole step."""

    def run(self, auxiliary: Mapping[str, int]) -> Timeline:
        recorder, update = self.recorder, self.partitioned.update
        for name, size in auxiliary.items():
            self.held.append(recorder.tensor(size, Label("auxiliary", "", name)))
        of_rank = self.passes_of_stage
        of_stage = update.graphs[self.stage] if update else None
        self._hold_parameters([*(made.graph for made in of_rank.values()), *([of_stage] if of_stage else [])])
        programs = {one: self._pass(one, made) for one, made in of_rank.items()}
        last = self._update(of_stage) if of_stage else None  # its constants exist from the beginning, too
        stages = self.stages(programs, self.types)
        for _ in range(2):  # the second step begins with what graphs hold from the first
            for program in [*programs.values(), *([last] if last else [])]:
                program.num_runs = 0
            recorder.restart()
            recorder.begin("before the step")
            results = self.run_passes(stages) if stages else self.run_whole(programs)
            if last and of_stage:
                results = last.run(self.update_inputs(of_stage, results))
            del results
            recorder.begin("after the step")
        return Timeline.of(recorder)

    # Memory of the whole step

    def _hold_parameters(self, graphs: list[Graph]) -> None:
        known, network = set[str](), {p.name for p in self.partitioned.report.parameters}
        for graph in graphs:
            for full, type in graph.parameters.items():
                name = full.rpartition(":")[2]
                if name in known or (self.strategy.optimizer_on_host and name.startswith(MOMENTS)):
                    continue
                known.add(name)
                size = num_bytes(type, self.platform.half_bytes)
                self.held.append(self.recorder.tensor(size, of_parameter(full, network)))

    def _program(
        self, name: str, graph: Graph, kinds: Mapping[Name, str], phases: Mapping[Name, str], phase: str
    ) -> RecordedProgram:
        graph = tile_broadcasts(graph) if self.platform.on_cpus and self.platform.tiles_broadcasts else graph
        of = lifetimes(graph, self.platform.order, self.platform.half_bytes)
        for constant, size in of.constants:
            self.held.append(self.recorder.tensor(size, Label("constant", "", constant.rpartition(":")[2])))
        return RecordedProgram(self.recorder, name, of, labels(of, self.cells, phases, kinds, phase))

    def _pass(self, one: StagePass, made: PassGraph) -> RecordedProgram:
        kinds = dict.fromkeys(self.cut.takers, "activation" if one.kind == "forward" else "communication")
        kinds |= dict.fromkeys(self.cut.kept, "communication")
        for position in self.partitioned.summed:
            kinds |= dict.fromkeys(self.cut.results[position].values(), "gradient")
        # A result that waits for side effects has another name in the graph.
        kinds |= {own: kinds[name] for own, name in zip(made.graph.outputs, made.given, strict=True) if name in kinds}
        title = f"{one.kind} pass" + (f" of part {one.part}" if self.strategy.mesh.pp > 1 else "")
        if not self.cut.results:
            title = "step" if self.partitioned.trained else "forward pass"
        return self._program(title, made.graph, kinds, self.phases, PHASE_OF_PASS[one.kind])

    def _update(self, graph: Graph) -> RecordedProgram:
        phases = {} if self.cut.passes else self.phases  # a batch that is not divided has its passes in there, too
        return self._program("update", graph, {}, phases, "optimizer")

    def inputs(self, types: Mapping[Name, TensorType]) -> list[Storage]:
        half = self.platform.half_bytes
        return [
            self.recorder.tensor(num_bytes(type, half), Label("input", "", name.rpartition(":")[2]))
            for name, type in types.items()
        ]


def memory_timeline(
    partitioned: Partitioned, rank: int, auxiliary: Mapping[str, int] | None = None, platform: Platform = DEVICES
) -> Timeline:
    """Record the memory of a rank over a step.

    Args:
        auxiliary: what else the rank holds during the whole step -> bytes.
    """
    other = replace(platform, order="written")
    as_written = _Step(partitioned, rank, other).run(auxiliary or {}).live_bytes
    return replace(_Step(partitioned, rank, platform).run(auxiliary or {}), live_as_written=as_written)


def pool_bytes(partitioned: Partitioned, rank: int, auxiliary: Mapping[str, int] | None = None) -> int:
    """Bytes of the pool that holds all allocations of a rank's step (`memory_timeline`)."""
    return _Step(partitioned, rank, DEVICES).run(auxiliary or {}).pool_bytes
