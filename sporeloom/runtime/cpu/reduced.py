# SPDX-License-Identifier: Apache-2.0
"""Checks that the compiler all-reduces every gradient over data-parallel ranks, which MindSpore 2.9 omits for some."""

from __future__ import annotations

import math
from collections.abc import Collection

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.cpu.lowering import attributes
from sporeloom.runtime.cpu.partition import PartitionedGraph
from sporeloom.runtime.layouts import ParameterLayout
from sporeloom.strategy.config import Strategy


def check_reduced(
    graph: PartitionedGraph, strategy: Strategy, trainable: Collection[str], trained: Collection[str] = ()
) -> None:
    """Check that gradients in a training graph are all-reduced: a replicated parameter must be updated by the sum of
    the gradients of all ranks. MindSpore inserts the all-reduce at the operator that uses a parameter. If a function
    shared by several layers uses it, as in nn.MultiheadAttention, it finds the first layer's only.

    In a pipeline the sum of a shared parameter may be in another stage, and is not checked; see `lost_gradients`.

    Args:
        trainable: names of the network's parameters that need a gradient; other values that a graph updates, such as
            moments of an optimizer or accumulated gradients, are local to each rank.
        trained: names of parameters whose gradients the graph returns; those that it updates itself are found.

    Raises:
        ConfigError: a gradient is not all-reduced.
    """
    if strategy.mesh.pp > 1:
        return
    read, updated, summed = _uses(graph)
    forgotten = [
        name
        for name, layout in graph.held_layouts.items()
        if name in trainable
        and name in read
        and (name in updated or name in trained)
        and name not in summed
        and _is_replicated(layout)
    ]
    if forgotten and (summed or strategy.mesh.dp > 1):  # tp alone: ranks with equal gradients need no sum
        raise ConfigError(
            f"{strategy.source}: MindSpore does not add up the gradient of {', '.join(forgotten[:8])} over the ranks, so "
            "each would train on its own rows: a function that several layers call uses it, as in nn.MultiheadAttention; "
            "use it in the Cell that holds it, as self.dense(x) with an nn.Dense or self.matmul(x, self.weight)"
        )


def lost_gradients(graph: PartitionedGraph, trainable: Collection[str]) -> list[str]:
    """Parameters that the training graph of a pipeline stage uses but does not update: MindSpore passes no gradient to
    the stage that updates them if they are used outside of Cells that have a stage."""
    read, updated, _ = _uses(graph)
    wanted = set(trainable)
    return sorted(read & wanted - updated) if updated & wanted else []  # inference updates only caches


def check_lost(lost: Collection[str], strategy: Strategy) -> None:
    """Refuse a strategy if `lost_gradients` found parameters on any rank.

    Raises:
        ConfigError: it found some.
    """
    if lost:
        raise ConfigError(
            f"{strategy.source}: a stage uses {', '.join(sorted(lost)[:8])}, which another one trains, outside the Cells "
            "that the rules name as layers, first_stage and last_stage, and MindSpore loses that gradient: use it in one, as "
            "self.head(x, self.table.embedding_table) with head in last_stage"
        )


def _uses(graph: PartitionedGraph) -> tuple[set[str], set[str], set[str]]:
    """Names of the parameters that a graph reads, those that it updates, and those whose gradients it all-reduces."""
    primitives = {p.name: p for p in graph.model.primitives}
    updating = {name for name, p in primitives.items() if attributes(p).get("side_effect_mem")}
    read: set[str] = set()
    updated: set[str] = set()
    summed: set[str] = set()
    for function in (graph.model.graph, *graph.model.functions):
        for node in function.node:
            name = node.op_type.removeprefix("REF::")
            given = [value.rpartition(":")[2] for value in node.input]
            if name in updating:
                updated.update(given[:1])
            else:
                read.update(given)
            summed.update(a.s.decode() for a in node.primal_attr if a.name == "mirror_user_id")
    return read, updated, summed


def _is_replicated(layout: ParameterLayout) -> bool:
    return not layout.optimizer_group and math.prod(layout.device_matrix) > math.prod(layout.shards)
