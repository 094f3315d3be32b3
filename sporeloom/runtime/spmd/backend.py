# SPDX-License-Identifier: Apache-2.0
"""Ranks that share one graph, which the first rank compiles for one device, and shard it themselves (SPMD)."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from mindspore import Parameter, Tensor, nn

from sporeloom.core.errors import Problems
from sporeloom.core.log import milestone
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.parallel.call import Call
from sporeloom.parallel.step import TrainStep
from sporeloom.partition.graph import Graph
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.sharded_graph import Communication, ShardedGraph
from sporeloom.partition.stages import StageGraphs
from sporeloom.runtime.backend import Backend
from sporeloom.runtime.compiler import without_collection
from sporeloom.runtime.spmd.call_graphs import CutCall, cut_call, num_microbatches_of
from sporeloom.runtime.spmd.compile import with_global_shapes
from sporeloom.runtime.spmd.pipeline import Exchange, ForwardStages, RankProgram, ScheduledStep, StagePrograms
from sporeloom.runtime.spmd.rank_graph import RankGraph, describe_inputs
from sporeloom.runtime.spmd.scheduled_call import CurrentParameters, ScheduledCall, keep_each
from sporeloom.runtime.spmd.shard import Sharded, decide, reports_in, shard
from sporeloom.runtime.spmd.step_graphs import Cut, compiled_or_cached, cut_cell, cut_update, microbatch_of, types_of
from sporeloom.strategy.layout import Shape
from sporeloom.strategy.schedule import idle_microbatches, microbatches_held


class Runnable(Protocol):
    """A compiled Cell."""

    @property
    def graphs(self) -> Sequence[RankGraph]:
        """The graphs that this rank executes."""
        ...

    def compile(self, inputs: Sequence[Tensor]) -> None: ...

    def run(self, inputs: Sequence[Tensor]) -> Any: ...


class Alteration(Protocol):
    """Changes to the program of a rank, by which a proof of it is tested."""

    def graph(self, part: str, graph: Graph, grid: DeviceGrid, rank: int) -> Graph:
        """The graph that a rank runs in place of its own. `part` names it: the whole step, a pass, or the update."""
        ...

    def order(self, stage: int, num_microbatches: int) -> Sequence[int]:
        """The microbatch whose inputs a stage reads for each microbatch of its schedule."""
        ...


class ProgramBackend(Backend, ABC):
    """A rank that runs compiled Cells and caches them by the shapes of their inputs."""

    partitions = True

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.programs: dict[tuple[int, bool, str], Runnable] = {}
        """(id of the Cell, whether it is in training mode, shapes of its inputs) -> compiled Cell."""

    def prepare(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> None:
        self.program(cell, inputs).compile(inputs)

    def run(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> Any:
        return self.program(cell, inputs).run(inputs)

    def program(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> Runnable:
        """This rank's compiled Cell, compiled on first use for each set of input shapes."""
        described = describe_inputs(inputs)
        key = (id(cell), cell.training, str(described))
        if key not in self.programs:
            gc.collect()  # networks lie in cycles, and those of earlier calls hold much memory
            with without_collection():
                self.programs[key] = self._compiled(cell, described)
        return self.programs[key]

    @abstractmethod
    def _compiled(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> Runnable:
        """Compile this rank's graph for inputs of these shapes and NumPy dtypes."""


class SpmdBackend(ProgramBackend):
    """One of several ranks whose graphs are derived from the graph of one device, and so are equivalent to it.
    Subclasses define how a rank runs its graphs and how ranks exchange values between them."""

    tells_values = False
    """Whether the graphs that are made from now on say which values they have parts of."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.sharded: list[ShardedGraph] = []
        """For each program, its communication and replicated computation; graphs are not kept."""
        self._shapes: dict[int, Shape] = {}
        """Id of a parameter -> global shape, for the parameters of all programs, which keep the ids valid."""
        self.current: CurrentParameters | None = None
        """State of parameters for calls in a pipeline."""
        self.alteration: Alteration | None = None

    @abstractmethod
    def make_program(self, graph: RankGraph, cell: nn.Cell, name: str, among: Sequence[int]) -> RankProgram:
        """Create a program that runs a graph of this rank.

        Args:
            name: name that distinguishes the messages of several graphs.
            among: the ranks that have a graph of that name.
        """

    @abstractmethod
    def exchange(self) -> Exchange:
        """Create the exchange of values between pipeline stages."""

    @abstractmethod
    def bytes_of_first(self, content: bytes) -> bytes:
        """Broadcast the content of rank 0."""

    def _partitioned(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> RankGraph:
        sharded = shard(self._one_devices_graph(cell, described), decide(cell, self.strategy.mesh))
        self._remember(sharded.result)
        return self._of_rank(sharded, sharded.result.graph, "step")

    def _of_rank(self, sharded: Sharded, graph: Graph, part: str) -> RankGraph:
        if self.alteration is not None:
            graph = self.alteration.graph(part, graph, sharded.grid, self.rank)
        return sharded.of_rank(self.rank, self.suited(graph), part if self.tells_values else None)

    def suited(self, graph: Graph) -> Graph:
        """A graph with the same results that suits the kernels of this backend."""
        return graph

    def _remember(self, sharded: ShardedGraph) -> None:
        self.sharded.append(replace(sharded, graph=Graph({}, {}, [], []), layouts={}, made={}))
        self.graph_summary = sharded.summary()

    def _compiled(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> Runnable:
        is_step = isinstance(cell, TrainStep)
        repeats = self.strategy.num_microbatches(cell.accumulate) if is_step else 1
        if repeats > 1 or (is_step and self.strategy.mesh.pp > 1):
            return self._scheduled_step(cell, described, repeats)
        if self.strategy.mesh.pp > 1 and isinstance(cell, Call):
            return self._scheduled_call(cell, described)
        if self.strategy.mesh.pp > 1:
            return ForwardStages(self._stages(cell, described)[0], self.strategy.num_virtual_stages)
        problems = Problems()
        graph = problems.of(self._partitioned, cell, described)
        self.agree(problems)
        assert graph is not None  # or it had problems
        self.layouts |= graph.layouts
        return self._program(graph, cell, f"program {len(self.programs)}", range(self.strategy.mesh.size))

    # Microbatches and stages

    def _scheduled_step(
        self, step: TrainStep, described: Sequence[tuple[Shape, Any]], num_microbatches: int
    ) -> ScheduledStep:
        """Compile a training step with microbatches or stages.

        Raises:
            ConfigError: the batch does not divide into microbatches.
        """
        microbatch, parts = microbatch_of(step, described, num_microbatches, self.strategy)
        programs, cut = self._stages(microbatch, parts, is_training=True)
        programs.maxima = range(1 + step.num_summed, 1 + len(step.trained))  # after the loss
        sharded = cut.sharded
        made, updated = self._with_update(programs, step, cut, num_microbatches)
        passes = programs.cut.passes
        mine = sharded.result.within(passes[one].graph for one in programs.programs if one.kind != "parameters")
        once = sharded.result.within(passes[one].graph for one in programs.programs if one.kind == "parameters")
        communications = once + mine * num_microbatches + updated
        of_stage = replace(sharded.result, communications=communications)
        self.graph_summary = of_stage.summary()
        if self.strategy.mesh.pp > 1:
            told = of_stage.summary(f"each rank of stage {programs.stage}")
            sent = programs.sent_bytes * num_microbatches
            self.graph_summary = (
                f"{told}; {sent / 1e6:.3g} MB to other stages. {self._schedule_summary(num_microbatches)}"
            )
        return made

    def _scheduled_call(self, call: Call, described: Sequence[tuple[Shape, Any]]) -> ScheduledCall:
        """Compile a user's call for a pipeline."""
        problems, name = Problems(), f"program {len(self.programs)}"
        model = self._one_devices_graph(call, described)
        cut = problems.of(self._cut_call, model, call, described)
        self.agree(problems)
        assert cut is not None
        used = cut.used_by_stages(self.strategy)
        for _, report in reports_in(call):
            for parameter, stages in used.items():
                report.place(parameter, min(stages))
        sharded, divided = cut.sharded, cut.divided
        stage = self.strategy.mesh.coordinate(self.rank, "pp")
        among = self.strategy.mesh.ranks_of_stage(stage)

        def program(graph: Graph, part: str, among: Sequence[int]) -> RankProgram:
            return self._program(self._of_rank(sharded, graph, part), call, f"{name} {part}", among)

        passes = {
            one: program(made.graph, f"{one.kind} {one.part}", among)
            for one, made in cut.stages.passes.items()
            if self.strategy.stage_of_part(one.part) == stage
        }
        once = program(divided.once, "once", among) if divided.once.outputs and stage == 0 else None
        early = program(divided.early, "early", among) if divided.early.outputs else None
        after = program(cut.after[stage], "after", range(self.strategy.mesh.size))
        types = types_of(sharded.result.graph)
        for made in cut.stages.passes.values():
            types |= types_of(made.graph)
        exchange = self.exchange()
        programs = StagePrograms(self.strategy, cut.stages, passes, types, exchange, name, keep_each(divided))
        if self.current is None:
            self.current = CurrentParameters(self.strategy, exchange)
        owners = {parameter.name: parameter for parameter in call.get_parameters()}
        return ScheduledCall(cut, programs, once, early, after, owners, self.current)

    def bring_up_to_date(self) -> None:
        if self.current is not None:
            self.current.bring_all()

    def is_current(self, parameter: Parameter) -> bool:
        stage = self.strategy.mesh.coordinate(self.rank, "pp")
        return self.current is None or self.current.is_current(parameter, stage)

    def _cut_call(self, model: mind_ir.ModelProto, call: Call, described: Sequence[tuple[Shape, Any]]) -> CutCall:
        cut = cut_call(model, call, self.strategy, num_microbatches_of(model, call, described, self.strategy))
        self._remember(cut.sharded.result)
        if cut.why_whole and self.rank == 0:
            milestone(f"the full batch goes through the stages at once, without microbatches: {cut.why_whole}")
        return cut

    def _schedule_summary(self, num_microbatches: int) -> str:
        """Memory and idle time of this rank's stage that follow from the schedule."""
        pipeline, mesh = self.strategy.pipeline, self.strategy.mesh
        order = mesh.pp, num_microbatches, pipeline.virtual_stages, pipeline.order
        held, idle = microbatches_held(mesh.coordinate(self.rank, "pp"), *order), idle_microbatches(*order)
        return (
            f"Schedule {pipeline.schedule}: it holds at most {held:.3g} microbatches, and is idle "
            f"{idle / (num_microbatches + idle):.0%} of a step if all parts take equally long"
        )

    def _stages(
        self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]], is_training: bool = False
    ) -> tuple[StagePrograms, Cut]:
        """The passes of this rank's stage; those of all stages are derived from one graph, which is equal on all ranks."""
        problems, name = Problems(), f"program {len(self.programs)}"
        cut = problems.of(self._cut, cell, described, is_training)
        self.agree(problems)
        assert cut is not None
        self._learn_stages(cell, cut.stages)
        mine = self.strategy.mesh.ranks_of_stage(self.strategy.mesh.coordinate(self.rank, "pp"))
        programs, types = {}, types_of(cut.sharded.result.graph)
        for one, made in cut.stages.passes.items():
            types |= types_of(made.graph)
            if self.strategy.stage_of_part(one.part) == mine.start // len(mine):
                graph = self._of_rank(cut.sharded, made.graph, f"{one.kind} {one.part}")
                programs[one] = self._program(graph, cell, f"{name} {one.kind} {one.part}", mine)
        return StagePrograms(self.strategy, cut.stages, programs, types, self.exchange(), name), cut

    def _program(self, graph: RankGraph, cell: nn.Cell, name: str, among: Sequence[int]) -> RankProgram:
        program = self.make_program(graph, cell, name, among)
        self.layouts |= graph.held_layouts
        self.groups |= graph.groups
        return program

    def _cut(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]], is_training: bool) -> Cut:
        cut = cut_cell(self._one_devices_graph(cell, described), cell, self.strategy, is_training)
        self._remember(cut.sharded.result)
        return cut

    def _learn_stages(self, cell: nn.Cell, graphs: StageGraphs) -> None:
        """Record in the reports which stages use each parameter."""
        for name, parts in graphs.holders.items():
            stage = min(map(self.strategy.stage_of_part, parts))
            for _, report in reports_in(cell):
                report.place(name.rpartition(":")[2], stage)

    def _with_update(
        self, programs: StagePrograms, step: TrainStep, cut: Cut, num_microbatches: int
    ) -> tuple[ScheduledStep, list[Communication]]:
        """Compile the update of a step. Returns the step, and the collectives of the update."""
        problems = Problems()
        update = problems.of(cut_update, self._one_devices_graph, cut, step, self.strategy)
        self.agree(problems)
        assert update is not None
        sharded, graph = update.sharded, update.graphs[programs.stage]
        self._remember(sharded.result)
        positions = {name: position for position, name in enumerate(sharded.result.graph.inputs)}
        program = self._program(
            self._of_rank(sharded, graph, "update"), step, f"{programs.name} update", range(self.strategy.mesh.size)
        )
        types = list(sharded.result.graph.inputs.values())
        taken = [positions[name] for name in graph.inputs]
        made = ScheduledStep(programs, program, taken, types, num_microbatches)
        if self.alteration is not None:
            made.order = self.alteration.order(programs.stage, num_microbatches)
        return made, sharded.result.within([graph])

    def _one_devices_graph(self, cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
        """The graph of one device, which rank 0 loads or compiles and broadcasts.

        Raises:
            ConfigError: it cannot be compiled.
        """
        problems, model = Problems(), None
        if self.rank == 0:
            with with_global_shapes(cell.get_parameters(), self._shapes):
                model = problems.of(compiled_or_cached, cell, described)
        self.agree(problems)
        if isinstance(cell, Call):
            cell.structure = self.broadcast_value(cell.take_structure() if self.rank == 0 else None, 0)
        content = self.bytes_of_first(b"" if model is None else model.SerializeToString())
        model = model if model is not None else mind_ir.ModelProto.FromString(content)
        owners = {parameter.name: id(parameter) for parameter in cell.get_parameters()}
        names = {p.name.rpartition(":")[2]: tuple(p.dims) for p in model.graph.parameter}
        self._shapes |= {owners[name]: shape for name, shape in names.items() if name in owners}
        return model

    def all_reduce(self) -> None:
        """Return None: a graph of one device has no other ranks."""
