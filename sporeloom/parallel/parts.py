# SPDX-License-Identifier: Apache-2.0
"""The different shards of a parameter under a strategy, and the first rank that holds each."""

from __future__ import annotations

from functools import partial

from sporeloom.parallel.report import ParameterReport
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.tensor_slice import TensorSlice, rank_slice


def parts_of(parameter: ParameterReport, mesh: Mesh) -> list[tuple[int, TensorSlice]]:
    """List (rank, shard) of each shard; together they are the full parameter, once."""
    holders: dict[TensorSlice, list[int]] = {}
    for rank in mesh.ranks_of_stage(parameter.stage):
        holders.setdefault(_operator_slice(parameter, mesh, rank), []).append(rank)
    count = parameter.optimizer_shards
    return [
        (rank, part if count == 1 else part.rows(index, count))
        for part, ranks in holders.items()
        for index, rank in enumerate(ranks[:count])
    ]


def held_part(parameter: ParameterReport, mesh: Mesh, rank: int) -> TensorSlice:
    """The shard of the parameter that `rank` holds, one of a stage that has the parameter."""
    part, count = _operator_slice(parameter, mesh, rank), parameter.optimizer_shards
    if count == 1:
        return part
    ranks = mesh.ranks_of_stage(mesh.coordinate(rank, "pp"))
    holders = [other for other in ranks if _operator_slice(parameter, mesh, other) == part]
    return part.rows(holders.index(rank) % count, count)


def _operator_slice(parameter: ParameterReport, mesh: Mesh, rank: int) -> TensorSlice:
    """The shard that the operators of `rank` use."""
    return rank_slice(parameter.global_shape, parameter.layout, mesh.degree, partial(mesh.coordinate, rank))
