# SPDX-License-Identifier: Apache-2.0
"""The different shards of a parameter under a strategy, and the first rank that holds each."""

from __future__ import annotations

from sporeloom.parallel.report import ParameterReport
from sporeloom.strategy.layout import degrees
from sporeloom.strategy.mesh import Mesh

Slices = tuple[slice, ...]


def parts_of(parameter: ParameterReport, mesh: Mesh) -> list[tuple[int, Slices]]:
    """List (rank, slice) of each shard; together they are the full parameter, once."""
    ranks = mesh.ranks_of_stage(parameter.stage)
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in ranks:
        holders.setdefault(_operator_part(parameter, mesh, rank), []).append(rank)
    parts = []
    for part, holding in holders.items():
        if parameter.optimizer_shards == 1:
            parts.append((holding[0], tuple(slice(*bounds) for bounds in part)))
            continue
        (start, stop), *others = part
        length = (stop - start) // parameter.optimizer_shards
        for index in range(parameter.optimizer_shards):
            first = slice(start + index * length, start + (index + 1) * length)
            parts.append((holding[index], (first, *(slice(*bounds) for bounds in others))))
    return parts


def held_part(parameter: ParameterReport, mesh: Mesh, rank: int) -> Slices:
    """Slice of the parameter that `rank` holds, one of a stage that has the parameter."""
    part = _operator_part(parameter, mesh, rank)
    if parameter.optimizer_shards == 1:
        return tuple(slice(*bounds) for bounds in part)
    (start, stop), *others = part
    ranks = mesh.ranks_of_stage(mesh.coordinate(rank, "pp"))
    holding = [other for other in ranks if _operator_part(parameter, mesh, other) == part]
    length = (stop - start) // parameter.optimizer_shards
    start += holding.index(rank) % parameter.optimizer_shards * length
    return (slice(start, start + length), *(slice(*bounds) for bounds in others))


def _operator_part(parameter: ParameterReport, mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
    """Bounds of the slice that the operators of `rank` use, by dim."""
    bounds = []
    cuts = degrees(parameter.layout, mesh)
    for size, axes, count in zip(parameter.global_shape, parameter.layout, cuts, strict=True):
        index = 0
        for axis in axes:
            index = index * mesh.degree(axis) + mesh.coordinate(rank, axis)
        bounds.append((index * size // count, (index + 1) * size // count))
    return tuple(bounds)
