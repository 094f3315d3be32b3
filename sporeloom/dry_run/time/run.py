# SPDX-License-Identifier: Apache-2.0
"""Runs a step of every stage with tasks in place of programs, by the runtime's own schedule, and simulates them together.

What overlaps on devices (`runtime.spmd.devices`):

- In a graph, collectives have a stream of their own. They are chained, and each waits for its input alone.
- A graph is a unit: the next one of the rank, and what is sent to other stages, starts when all of it has ended.
- Sending waits for nobody. A message is received when the rank has done all before it, and the rank waits for it: it moves
  when both are there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sporeloom.dry_run.memory.liveness import num_bytes
from sporeloom.dry_run.partitioned import Partitioned
from sporeloom.dry_run.time.device_model import DeviceModel
from sporeloom.dry_run.time.kernels import Graphs
from sporeloom.dry_run.time.simulate import COMPUTE, PASS, RankTime, Task, simulate
from sporeloom.dry_run.walk import StepWalk
from sporeloom.partition.broadcasts import tile_broadcasts
from sporeloom.partition.graph import Graph, Name, TensorType
from sporeloom.planner.cluster import Cluster
from sporeloom.runtime.spmd.step_graphs import types_of

MOMENTS = ("adam_m.", "adam_v.")


@dataclass(frozen=True, slots=True)
class Made:
    """Stands for a tensor. No tuple: a graph with one output returns it alone."""

    by: int | None
    """Number of the task whose result it is; None: it is there from the beginning."""
    num_bytes: int


@dataclass
class TaskList:
    """The tasks of a rank, in the order in which its host issues them."""

    tasks: list[Task] = field(default_factory=list)
    last: int | None = None
    """The last task of the compute stream."""

    def add(self, task: Task) -> int:
        number = len(self.tasks)
        self.tasks.append(task)
        if task.stream == COMPUTE:
            self.last = number
        return number

    def after(self, values: Iterable[Made]) -> tuple[int, ...]:
        """Numbers of the tasks that make some values."""
        return tuple(sorted({value.by for value in values if value.by is not None}))


class TimedProgram:
    """Stands for a rank's graph: a run of it adds its tasks."""

    graph: Any = None
    graphs: Sequence[Any] = ()

    def __init__(self, name: str, into: TaskList, tasks: Sequence[Task], outputs: Sequence[int]):
        self.name, self.into, self.outputs = name, into, outputs
        self.tasks = tasks
        self._alone: RankTime | None = None
        if not any(task.meets for task in tasks):  # other stages have no part in it: it takes as long every time
            self._alone = simulate({0: tasks})[0]

    def compile(self, inputs: Sequence[Any]) -> None:
        """Do nothing: there are no kernels to choose."""

    def run(self, inputs: Sequence[Made]) -> Any:
        into, needs = self.into, self.into.after(inputs)
        if self._alone:
            number = into.add(Task(self.name, PASS, COMPUTE, self._alone.end, needs=needs, inside=self._alone))
        else:
            number = self._in_full(needs)
        made = [Made(number, size) for size in self.outputs]
        return made[0] if len(made) == 1 else tuple(made)

    def _in_full(self, needs: tuple[int, ...]) -> int:
        """Add each task, and one that waits for all of them."""
        into = self.into
        first = into.add(Task(self.name, "memory", COMPUTE, 0.0, needs=needs))
        for task in self.tasks:
            moved = tuple(first + 1 + number for number in task.needs)
            into.add(replace(task, needs=moved or (first,)))
        return into.add(Task(self.name, "memory", COMPUTE, 0.0, needs=tuple(range(first, len(into.tasks)))))


@dataclass
class TimedExchange:
    """Communication between stages, and sums of results, as tasks."""

    into: TaskList
    device: DeviceModel
    rank: int

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Do nothing: nobody is there."""

    def send(self, peer: int, tag: tuple[str, Name, int], value: Made, type: TensorType) -> None:
        self._message("Send", self.rank, peer, tag, num_bytes(type), self.into.after([value]))

    def receive(self, peer: int, tag: tuple[str, Name, int], type: TensorType) -> Made:
        before = () if self.into.last is None else (self.into.last,)
        size = num_bytes(type)
        return Made(self._message("Receive", peer, self.rank, tag, size, before), size)

    def _message(self, kind: str, source: int, target: int, tag: Hashable, size: int, needs: tuple[int, ...]) -> int:
        peer = target if kind == "Send" else source
        seconds = self.device.collective("Message", size, sorted((source, target))).seconds
        name = f"{kind} {'to' if kind == 'Send' else 'from'} {peer}"
        stream = f"from {source} to {target}"  # each direction has a group, and so a stream
        pair, meets = (source, target), (source, target, tag)
        return self.into.add(Task(name, kind, stream, seconds, needs=needs, meets=meets, num_bytes=size, pair=pair))

    def settle(self) -> None:
        """Wait for messages that are on their way."""
        sent = tuple(number for number, task in enumerate(self.into.tasks) if task.kind == "Send")
        if sent:
            self.into.add(Task("sent", "memory", COMPUTE, 0.0, needs=sent))

    def zeros(self, type: TensorType) -> Made:
        return Made(None, num_bytes(type))

    def add(self, total: Made | None, value: Made) -> Made:
        return value if total is None else self._passes("sum of results", 3 * value.num_bytes, (total, value))

    def larger(self, total: Made | None, value: Made) -> Made:
        return self.add(total, value)

    def sum_of(self, total: Made) -> Made:
        return total

    def join(self, values: Sequence[Made], dim: int) -> Made:
        return self._passes("results of all microbatches", 2 * sum(value.num_bytes for value in values), values)

    def broadcast(self, value: Any, type: TensorType, ranks: Any, source: int, tag: Any) -> Made:
        raise AssertionError("only calls of custom networks broadcast, and these are not timed")

    def _passes(self, name: str, moved: int, values: Sequence[Made]) -> Made:
        seconds, launch = self.device.passes(moved), self.device.launch
        number = self.into.add(Task(name, "memory", COMPUTE, seconds + launch, launch, self.into.after(values)))
        return Made(number, values[-1].num_bytes)


class _TimedStep(StepWalk):
    """A step of one rank."""

    def __init__(self, partitioned: Partitioned, rank: int, device: DeviceModel):
        self.into, self.device = TaskList(), device
        super().__init__(partitioned, rank, TimedExchange(self.into, device, rank))
        self.types = types_of(partitioned.cut.sharded.result.graph)

    def tasks(self) -> list[Task]:
        update, grid = self.partitioned.update, self.partitioned.cut.sharded.grid
        graphs = Graphs(self.device, grid, self.rank, self.types)
        programs = {
            one: self._program(f"{one.kind} of part {one.part}", graphs, made.graph)
            for one, made in self.passes_of_stage.items()
        }
        stages = self.stages(programs, self.types)
        results = self.run_passes(stages) if stages else self.run_whole(programs)
        if update:
            graph = update.graphs[self.stage]
            of_update = Graphs(self.device, update.sharded.grid, self.rank, {})
            self._program("update", of_update, graph).run(self.update_inputs(graph, results))
        self._move_moments()
        return self.into.tasks

    def _program(self, name: str, graphs: Graphs, graph: Graph) -> TimedProgram:
        if self.device.cluster.is_cpu and self.strategy.mesh.size > 1:  # as processes run it; of one, only large steps
            graph = tile_broadcasts(graph)
        types = dict(graphs.known) | types_of(graph)
        outputs = [num_bytes(types.get(output)) for output in graph.outputs]
        tasks, call = graphs.tasks(graph), self.device.graph
        if call:
            tasks.append(Task("call of the graph", "memory", COMPUTE, call, call))
        return TimedProgram(name, self.into, tasks, outputs)

    def _move_moments(self) -> None:
        """Add the time in which moments that the host holds come and go."""
        if not self.strategy.optimizer_on_host:
            return
        update, graphs = self.partitioned.update, [made.graph for made in self.passes_of_stage.values()]
        graphs += [update.graphs[self.stage]] if update else []
        held = {name: type for graph in graphs for name, type in graph.parameters.items()}
        size = sum(num_bytes(type) for name, type in held.items() if name.rpartition(":")[2].startswith(MOMENTS))
        self.into.add(Task("moments", "host", COMPUTE, self.device.host(2 * size)))

    def inputs(self, types: Mapping[Name, TensorType]) -> list[Made]:
        return [Made(None, num_bytes(type)) for type in types.values()]


def step_tasks(partitioned: Partitioned, device: DeviceModel) -> dict[int, list[Task]]:
    """The tasks of a step, for the first rank of each stage."""
    mesh = partitioned.strategy.mesh
    ranks = [stage * mesh.stage_size for stage in range(mesh.pp)]
    return {rank: _TimedStep(partitioned, rank, device).tasks() for rank in ranks}


def step_times(partitioned: Partitioned, cluster: Cluster) -> dict[int, RankTime]:
    """Simulate a step on a cluster: the first rank of each stage. The other ranks of a stage have the same graphs and do the
    same at the same time."""
    mesh = partitioned.strategy.mesh
    return simulate(step_tasks(partitioned, DeviceModel(cluster.with_running(mesh.size), mesh.stage_size, mesh.size)))
