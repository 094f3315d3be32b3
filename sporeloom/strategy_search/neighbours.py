# SPDX-License-Identifier: Apache-2.0
"""Neighbours of a strategy: it with one setting changed, as the last part of a search simulates them around its best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from sporeloom.strategy.config import Pipeline, Recompute, Strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.stages import layers_per_stage
from sporeloom.strategy_search.candidates import (
    SPLIT_PIPELINES,
    Candidate,
    problems,
    recomputations,
    shardings,
    with_recompute,
)
from sporeloom.strategy_search.request import TuneRequest


def neighbours(request: TuneRequest, candidate: Candidate) -> list[Candidate]:
    """The legal strategies that differ in one setting: microbatch, recomputation, ZeRO, sequence parallelism, schedule, or
    two degrees of the mesh, of which one is doubled and one halved."""
    changed = itertools.chain(
        _microbatches(request, candidate),
        _recomputations(request, candidate),
        _shardings(request, candidate),
        _schedules(candidate),
        _meshes(request, candidate),
    )
    found = {one.name: one for one in changed if one != candidate and not problems(request, one)}
    return [one for one in found.values() if not request.plan.cluster.refuses(one.strategy.mesh)]


def _microbatches(request: TuneRequest, candidate: Candidate) -> Iterator[Candidate]:
    """Twice as many microbatches, and half as many."""
    number = candidate.strategy.num_microbatches(candidate.accumulate)
    for changed in (2 * number, number // 2):
        if changed and request.batch_size // candidate.strategy.mesh.dp % changed == 0:
            yield _with_microbatches(candidate, changed)


def _with_microbatches(candidate: Candidate, number: int) -> Candidate:
    strategy = candidate.strategy
    if strategy.mesh.pp == 1:
        return replace(candidate, accumulate=number)
    pipeline = replace(strategy.pipeline, num_microbatches=number)
    return replace(candidate, strategy=replace(strategy, pipeline=pipeline))


def _recomputations(request: TuneRequest, candidate: Candidate) -> Iterator[Candidate]:
    """No recomputation, each kind of it in all layers, in half as many layers as now, and in one more and one less of each
    stage."""
    strategy = candidate.strategy
    layers, now = layers_per_stage(request.model.values.num_layers, strategy), strategy.recompute
    yield replace(candidate, strategy=replace(strategy, recompute=None))
    yield from recomputations(request, candidate)
    if now is None:
        return
    counts = layers if now.per_stage is None else now.per_stage
    for fewer in ([max(0, n - 1) for n in counts], [n // 2 for n in counts]):
        if any(fewer):
            yield with_recompute(candidate, Recompute(kind=now.kind, per_stage=fewer))
    more = [min(n + 1, most) for n, most in zip(counts, layers, strict=True)]
    yield with_recompute(candidate, Recompute(kind=now.kind, per_stage=None if more == layers else more))


def _shardings(request: TuneRequest, candidate: Candidate) -> Iterator[Candidate]:
    """Other kinds of ZeRO; with and without sequence parallelism."""
    strategy = candidate.strategy
    for zero in shardings(request, strategy.mesh, strategy.num_microbatches(candidate.accumulate)):
        yield replace(candidate, strategy=replace(strategy, optimizer_parallel=zero))
    if strategy.mesh.tp > 1 and not candidate.rules:
        yield replace(candidate, strategy=replace(strategy, sequence_parallel=not strategy.sequence_parallel))


def _schedules(candidate: Candidate) -> Iterator[Candidate]:
    strategy = candidate.strategy
    for schedule, virtual in SPLIT_PIPELINES if strategy.mesh.pp > 1 else ():
        pipeline = replace(strategy.pipeline, schedule=schedule, virtual_stages=virtual)
        pipeline = replace(pipeline, stages=Pipeline().stages) if virtual > 1 else pipeline
        yield replace(candidate, strategy=replace(strategy, pipeline=pipeline))


def _meshes(request: TuneRequest, candidate: Candidate) -> Iterator[Candidate]:
    """One of dp, tp and pp doubled and another halved, with microbatches of the same size, else of half of it or double.
    Recomputation is of all layers of a stage or of none, as these have other numbers of layers."""
    mesh = candidate.strategy.mesh
    size = request.batch_size // mesh.dp // candidate.strategy.num_microbatches(candidate.accumulate)
    for doubled, halved in itertools.permutations(("dp", "tp", "pp"), 2) if mesh.ep == 1 else ():
        if mesh.degree(halved) % 2:
            continue
        degrees = {axis: degree for axis, degree in mesh.degrees.items() if axis != "ep"}
        degrees |= {doubled: 2 * mesh.degree(doubled), halved: mesh.degree(halved) // 2}
        other, of_replica = Mesh(order=mesh.order, **degrees), request.batch_size // degrees["dp"]
        for rows in (size, 2 * size, size // 2):
            if (
                request.batch_size % degrees["dp"]
                or not rows
                or of_replica % rows
                or degrees["pp"] > of_replica // rows
            ):
                continue
            yield from _on(candidate, other, of_replica // rows)


def _on(candidate: Candidate, mesh: Mesh, number: int) -> Iterator[Candidate]:
    """The candidate on another mesh, with the same settings as far as they have a meaning there."""
    old = candidate.strategy
    pipeline = Pipeline()
    if mesh.pp > 1:
        was = old.pipeline if old.mesh.pp > 1 else pipeline
        virtual = was.virtual_stages
        pipeline = Pipeline(num_microbatches=number, schedule=was.schedule, virtual_stages=virtual)
    now = old.recompute and replace(old.recompute, per_stage=None)
    zero = old.optimizer_parallel and replace(old.optimizer_parallel, shard_size=None)
    if zero and zero.shard_accumulated_gradients and number == 1:
        zero = replace(zero, shard_accumulated_gradients=False)
    moved: Strategy = replace(
        old,
        mesh=mesh,
        pipeline=pipeline,
        optimizer_parallel=zero if mesh.replicas > 1 else None,
        sequence_parallel=old.sequence_parallel and mesh.tp > 1,
        recompute=now,
    )
    one = Candidate(moved, number if mesh.pp == 1 else 1)
    yield one
    if mesh.tp > 1 and not moved.sequence_parallel:
        yield replace(one, strategy=replace(moved, sequence_parallel=True))
    if old.recompute and old.recompute.per_stage is not None:
        yield replace(one, strategy=replace(moved, recompute=None))
