# SPDX-License-Identifier: Apache-2.0
"""Runs a user's call in a pipeline: the graph that runs once, the passes of each microbatch, and the graph after them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor

from sporeloom.partition.graph import Name, TensorType
from sporeloom.partition.microbatches import NUMBER, DividedGraph, Total
from sporeloom.runtime.spmd.call_graphs import CutCall, Stages
from sporeloom.runtime.spmd.pipeline import Exchange, RankProgram, Schedule, StagePrograms
from sporeloom.runtime.spmd.program import storage
from sporeloom.runtime.spmd.rank_graph import RankGraph
from sporeloom.strategy.config import Strategy


class CurrentParameters:
    """Tracks which stages have the current value of each parameter, and sends it to other stages that need it.

    A stage updates the parameters that it computes with. Another graph may use them in other stages: an evaluation with a
    network of its own, or a separate call of an optimizer.
    """

    def __init__(self, strategy: Strategy, exchange: Exchange):
        self.strategy, self.exchange = strategy, exchange
        self._holders: dict[int, Stages] = {}
        """Id of a parameter -> stages with its current value; default: all."""
        self._users: dict[int, tuple[Name, Parameter, Stages, TensorType]] = {}
        """Id of a parameter -> its name, the parameter (referenced, so that the id stays valid), the stages of all
        graphs that compute with it, and its local type."""

    def register(
        self, used: Mapping[Name, Stages], owners: Mapping[Name, Parameter], shapes: Mapping[Name, TensorType]
    ) -> None:
        """Record which stages compute with the parameters of a graph. All ranks do so in the same order."""
        for name, stages in used.items():
            parameter = owners[name]
            known = self._users.get(id(parameter), (name, parameter, frozenset(), shapes[name]))
            self._users[id(parameter)] = known[0], parameter, known[2] | stages, shapes[name]

    def bring_all(self) -> None:
        """Bring the current value of each parameter to all stages that compute with it. All ranks call it at the same
        point."""
        for name, parameter, stages, type in list(self._users.values()):
            self.bring({name: stages}, {name: parameter}, {name: type})

    def bring(
        self, wanted: Mapping[Name, Stages], owners: Mapping[Name, Parameter], shapes: Mapping[Name, TensorType]
    ) -> None:
        """Bring the current values of parameters to stages that need them. All ranks call it with the same arguments.

        Args:
            shapes: local type of each parameter.
        """
        stage_size, rank = self.strategy.mesh.stage_size, self.exchange.rank
        mine, place = divmod(rank, stage_size)
        for name, stages in wanted.items():
            holders = self._holders.get(id(owners[name]))
            if holders is None or stages <= holders:
                continue
            parameter = storage(owners[name])  # the float32 copy that programs use
            source, missing = min(holders), sorted(stages - holders)
            if mine == source or mine in missing:
                ranks = [stage * stage_size + place for stage in (source, *missing)]
                value = self.exchange.add(None, parameter) if mine == source else None
                given = self.exchange.broadcast(value, shapes[name], ranks, 0, ("parameter", name))
                if mine != source:
                    parameter.set_data(given.astype(parameter.dtype), slice_shape=parameter.sliced)
            self._holders[id(owners[name])] = holders | stages

    def is_current(self, parameter: Parameter, stage: int) -> bool:
        """Whether a stage has the current value of a parameter."""
        return stage in self._holders.get(id(parameter), (stage,))

    def wrote(self, written: Mapping[Name, Stages], owners: Mapping[Name, Parameter]) -> None:
        """Record that stages have updated parameters, so that the values of other stages are outdated."""
        for name, stages in written.items():
            self._holders[id(owners[name])] = stages


class ScheduledCall:
    """A call that is ready to run on this rank. Its results are available on all ranks.

    Args:
        cut: the graphs of all stages.
        passes: the passes of `main` in this stage.
        once: the graph that draws random numbers, on ranks of the first stage; None if there is none.
        early: the graph of sums of inputs; None if there is none.
        after: the graph of this stage after the passes.
        owners: name -> parameter.
    """

    def __init__(
        self,
        cut: CutCall,
        passes: StagePrograms,
        once: RankProgram | None,
        early: RankProgram | None,
        after: RankProgram,
        owners: Mapping[Name, Parameter],
        current: CurrentParameters,
    ):
        self.cut, self.passes, self.once, self.early, self.after = cut, passes, once, early, after
        self.owners, self.current = owners, current
        self.schedule = Schedule(passes, cut.num_microbatches)
        self._used, self._written = cut.used_by_stages(passes.strategy), cut.written_by_stages()
        parameters = cut.sharded.result.graph.parameters
        self._shapes = {name.rpartition(":")[2]: type for name, type in parameters.items()}
        current.register(self._used, owners, self._shapes)
        self._after_inputs = list(cut.after[passes.stage].inputs)
        self._positions = {name: position for position, name in enumerate(cut.divided.main.outputs)}

    @property
    def graphs(self) -> Sequence[RankGraph]:
        programs = [*self.passes.programs.values(), *filter(None, (self.once, self.early)), self.after]
        return [program.graph for program in programs]

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Do nothing: MindSpore selects the kernels in the first run."""

    def run(self, inputs: Sequence[Tensor]) -> Any:
        divided, exchange = self.cut.divided, self.passes.exchange
        self.current.bring(self._used, self.owners, self._shapes)
        values = dict(zip(self.cut.sharded.result.graph.inputs, inputs, strict=True))
        values |= self._computed_once(values)
        microbatches = [self._rows(values, number) for number in range(self.cut.num_microbatches)]
        values |= self._early_totals(values, microbatches)
        results = self.schedule.run([_given(divided.main.inputs, values, rows) for rows in microbatches])
        for name, total in divided.totals.items():
            values[name] = self._total(name, total, results)
        exchange.settle()
        returned = self.after.run(_given(self._after_inputs, values))
        self.current.wrote(self._written, self.owners)
        return returned

    def _computed_once(self, values: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        """Random numbers, which the first stage draws and broadcasts to all stages."""
        divided, passes = self.cut.divided, self.passes
        if not divided.drawn:
            return {}
        drawn: Sequence[Tensor | None] = [None] * len(divided.drawn)
        if self.once is not None:
            drawn = _outputs(self.once.run(_given(divided.once.inputs, values)))
        ranks = [passes.peer(stage) for stage in range(passes.strategy.mesh.pp)]
        return {
            name: passes.exchange.broadcast(
                None if value is None else passes.exchange.add(None, value),
                passes.types[name],
                ranks,
                0,
                (passes.name, "once", name),
            )
            for name, value in zip(divided.drawn, drawn, strict=True)
        }

    def _rows(self, values: Mapping[Name, Tensor], number: int) -> dict[Name, Tensor]:
        """The slices of values for a microbatch, and its index."""
        divided = self.cut.divided
        numbers = {name for name in (*divided.early.inputs, *divided.main.inputs) if name.startswith(NUMBER)}
        found = {name: Tensor(np.array(number, name.removeprefix(NUMBER))) for name in numbers}
        for name, (source, dim) in divided.rows.items():
            array = values[source].asnumpy()
            length = array.shape[dim] // self.cut.num_microbatches
            part = array.take(range(number * length, (number + 1) * length), dim)
            found[name] = Tensor(np.ascontiguousarray(part))
        return found

    def _early_totals(
        self, values: Mapping[Name, Tensor], microbatches: Sequence[Mapping[Name, Tensor]]
    ) -> dict[Name, Tensor]:
        """Totals that depend on inputs alone, which every stage computes."""
        graph = self.cut.divided.early
        if self.early is None:
            return {}
        found: dict[Name, list[Tensor]] = {name: [] for name in graph.outputs}
        for rows in microbatches:
            for name, value in zip(
                graph.outputs, _outputs(self.early.run(_given(graph.inputs, values, rows))), strict=True
            ):
                found[name].append(value)
        return {
            name: self._made_up(found[total.source], total) for name, total in self.cut.divided.early_totals.items()
        }

    def _made_up(self, values: Sequence[Tensor], total: Total) -> Tensor:
        exchange = self.passes.exchange
        if total.dim is not None:
            return exchange.join(values, total.dim)
        sum_of: Any = None
        for value in values:
            sum_of = exchange.add(sum_of, value)
        return exchange.sum_of(sum_of)

    def _total(self, name: Name, total: Total, results: Mapping[int, Any]) -> Tensor:
        """The total of the results of the passes; zeros if this stage has none, in which case they are unused."""
        exchange, position = self.passes.exchange, self._positions[total.source]
        if position not in results:
            return exchange.zeros(self.passes.types[name])
        result = results[position]
        if position not in self.passes.keep_each:
            return exchange.sum_of(result)
        return self._made_up([result[number] for number in sorted(result)], total)


def keep_each(divided: DividedGraph) -> set[int]:
    """Indices of the results of `main` that are concatenated."""
    joined = {total.source for total in divided.totals.values() if total.dim is not None}
    return {position for position, name in enumerate(divided.main.outputs) if name in joined}


def _given(
    names: Iterable[Name], values: Mapping[Name, Tensor], rows: Mapping[Name, Tensor] | None = None
) -> list[Tensor]:
    return [rows[name] if rows and name in rows else values[name] for name in names]


def _outputs(given: Any) -> Sequence[Tensor]:
    return given if isinstance(given, (tuple, list)) else (given,)
