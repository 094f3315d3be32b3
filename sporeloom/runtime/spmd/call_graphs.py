# SPDX-License-Identifier: Apache-2.0
"""The graphs of pipeline stages for any call of a user's Cell or function; no process is involved.

The graph of the full batch is sharded over microbatches as if these were ranks, and divided: see `partition/microbatches.py`.
What runs for each microbatch is partitioned into the passes of the stages; what runs once, such as an update, into one graph
for each stage. A graph that cannot be divided runs on the full batch at once, stage after stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.parallel.call import Call
from sporeloom.partition.graph import Graph, Name, is_effect
from sporeloom.partition.microbatches import DividedGraph, divide, undivided
from sporeloom.partition.mindir import read_graph
from sporeloom.partition.sharded_graph import MixedRowsError, PartitionError
from sporeloom.partition.stages import StageGraphs, cut_into_stages
from sporeloom.partition.updates import cut_updates
from sporeloom.runtime.spmd.shard import Sharded, decide, reports_in, shard
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape
from sporeloom.strategy.schedule import splits_backward

Stages = frozenset[int]


@dataclass(frozen=True)
class CutCall:
    """The graphs of a call."""

    sharded: Sharded
    divided: DividedGraph
    stages: StageGraphs
    """The passes of `divided.main`."""
    after: list[Graph]
    """One graph for each stage."""
    num_microbatches: int
    why_whole: str = ""
    """The reason why it runs on the full batch at once although the strategy has microbatches; empty if it does not."""

    @property
    def summed(self) -> set[Name]:
        """Outputs of `divided.main` that are summed over microbatches."""
        return {total.source for total in self.divided.totals.values() if total.dim is None}

    def used_by_stages(self, strategy: Strategy) -> dict[Name, Stages]:
        """Parameter, by its short name -> the stages that read or write it."""
        found: dict[Name, set[int]] = {}
        for one, made in self.stages.passes.items():
            for name in made.graph.parameters:
                found.setdefault(_short(name), set()).add(strategy.stage_of_part(one.part))
        for stage, graph in enumerate(self.after):
            for name in graph.parameters:
                found.setdefault(_short(name), set()).add(stage)
        return {name: frozenset(stages) for name, stages in found.items()}

    def written_by_stages(self) -> dict[Name, Stages]:
        """Parameter, by its short name -> the stages that write it."""
        found: dict[Name, set[int]] = {}
        for stage, graph in enumerate(self.after):
            for node in graph.nodes:
                if is_effect(node, graph):
                    for name in node.flat_inputs():
                        if name in graph.parameters:
                            found.setdefault(_short(name), set()).add(stage)
        return {name: frozenset(stages) for name, stages in found.items()}


def cut_call(model: mind_ir.ModelProto, cell: nn.Cell, strategy: Strategy, num_microbatches: int) -> CutCall:
    """Shard one device's graph of a call, and partition it over the stages.

    Raises:
        ConfigError: it cannot be sharded or partitioned by the strategy.
    """
    try:
        if num_microbatches > 1:
            try:
                return _cut(model, cell, strategy, num_microbatches)
            except MixedRowsError as mixed:
                return replace(_cut(model, cell, strategy, 1), why_whole=str(mixed))
        return _cut(model, cell, strategy, 1)
    except PartitionError as error:
        raise ConfigError(f"engine spmd: {error}") from None


def _cut(model: mind_ir.ModelProto, cell: nn.Cell, strategy: Strategy, num_microbatches: int) -> CutCall:
    sharded = shard(model, decide(cell, strategy.mesh, num_microbatches, strategy.shards_gradients))
    graph, parts = sharded.result.graph, dict[str, int]()
    for _, report in reports_in(cell):
        parts |= report.parts
    divided = divide(graph, sharded.grid) if num_microbatches > 1 else undivided(graph)
    joined = {total.source for total in divided.totals.values() if total.dim is not None}
    divided.main.outputs.sort(key=lambda name: name not in joined)  # the sums last
    splits = splits_backward(strategy.pipeline.order)
    stages = cut_into_stages(divided.main, parts, splits, len(joined), strategy.stage_of_part, num_microbatches > 1)
    after = cut_updates(
        divided.after, strategy.mesh.pp, _holders(divided, stages, parts, strategy), given_by(divided, stages, strategy)
    )
    return CutCall(sharded, divided, stages, after, num_microbatches)


def given_by(divided: DividedGraph, stages: StageGraphs, strategy: Strategy) -> dict[Name, Stages]:
    """Total over microbatches -> the stages that have a summand of it."""
    positions = {name: position for position, name in enumerate(divided.main.outputs)}
    return {
        name: frozenset(map(strategy.stage_of_part, stages.results[positions[total.source]]))
        for name, total in divided.totals.items()
    }


def _holders(
    divided: DividedGraph, stages: StageGraphs, parts: Mapping[str, int], strategy: Strategy
) -> dict[Name, Stages]:
    """Parameters of `after` -> the stages that update them: those that compute with them, or else the stage of the Cell
    that contains them. An optimizer state `PREFIX.NAME` follows NAME; parameters without a stage are in all stages."""
    users = {_short(name): frozenset(map(strategy.stage_of_part, found)) for name, found in stages.holders.items()}
    holders = {}
    for full in divided.after.parameters:
        name = _short(full)
        for of in (name, name.partition(".")[2]):
            cells = [path for path in parts if of.startswith(f"{path}.")]
            if of in users or cells:
                holders[full] = users.get(of) or frozenset([strategy.stage_of_part(parts[max(cells, key=len)])])
                break
    return holders


def _short(name: Name) -> str:
    return name.rpartition(":")[2]


def num_microbatches_of(
    model: mind_ir.ModelProto, cell: nn.Cell, described: Sequence[tuple[Shape, Any]], strategy: Strategy
) -> int:
    """Number of microbatches of a call with inputs of these shapes: one if it does not train and the batch is not
    divisible.

    Raises:
        ConfigError: it trains, and its batch is not divisible.
    """
    wanted, dp = strategy.pipeline.num_microbatches, strategy.mesh.dp
    rows = next((shape[0] for shape, _ in described if shape and shape[0] % dp == 0), 0)
    if (isinstance(cell, Call) and not cell.takes_batch) or not rows:
        return 1
    if rows % (wanted * dp) == 0:
        return wanted
    graph = read_graph(model)
    if not any(is_effect(node, graph) for node in graph.nodes):
        return 1
    parts = wanted * dp
    low = rows // parts * parts
    near = f"{low} or {low + parts}" if low else str(parts)
    ranks = f" on each of {dp} data-parallel ranks" if dp > 1 else ""
    raise ConfigError(
        f"{strategy.at('pipeline.num_microbatches')}: a batch of {rows} does not divide into {wanted} microbatches{ranks}; "
        f"take {near}"
    )
