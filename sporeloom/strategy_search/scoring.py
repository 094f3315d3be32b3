# SPDX-License-Identifier: Apache-2.0
"""First stage of a search: score every candidate in closed form, and choose those that are simulated."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from sporeloom.core.log import progress
from sporeloom.planner.closed_forms import job_of
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.memory import StageMemory, stage_memory
from sporeloom.planner.search import Option, evaluate
from sporeloom.strategy.config import Recompute
from sporeloom.strategy.stages import layers_per_stage
from sporeloom.strategy_search.candidates import Candidate, candidates, meshes, recomputations, with_recompute
from sporeloom.strategy_search.neighbours import neighbours
from sporeloom.strategy_search.request import TuneRequest

MARGINS = (1.0, 0.9)
"""Shares of the usable memory for which as few layers as fit are recomputed: a simulated step may need more than its closed
form."""


@dataclass(frozen=True)
class Scored:
    """A candidate with its closed form."""

    candidate: Candidate
    name: str
    seconds: float
    peak_bytes: float


@dataclass
class ScoredCandidates:
    """All candidates that fit, and what became of the others."""

    fitting: list[Scored] = field(default_factory=list)
    num_scored: int = 0
    nearest: Scored | None = None
    """The candidate with the least memory of those that do not fit."""
    num_meshes: int = 0

    def add(self, found: Scored, usable_bytes: float) -> None:
        """Count a candidate."""
        self.num_scored += 1
        if found.peak_bytes <= usable_bytes:
            self.fitting.append(found)
        elif self.nearest is None or (found.peak_bytes, found.name) < (self.nearest.peak_bytes, self.nearest.name):
            self.nearest = found


def score(request: TuneRequest, max_meshes: int) -> ScoredCandidates:
    """Score all candidates on the best meshes."""
    scores, usable = ScoredCandidates(), request.plan.cluster.usable_bytes
    dims = request.dims
    jobs = meshes(request, max_meshes)
    scores.num_meshes = len(jobs)

    def closed_form(candidate: Candidate) -> Option:
        return _closed_form(request, dims, candidate)

    for job in progress(jobs, "meshes scored"):
        for candidate in candidates(request, job):
            plain = closed_form(candidate)
            scores.add(_scored(candidate, plain), usable)
            for recomputed in recomputations(request, candidate):
                full = closed_form(recomputed)
                scores.add(_scored(recomputed, full), usable)
                for fewer in _fewer_layers(request, recomputed, plain, full):
                    scores.add(_scored(fewer, closed_form(fewer)), usable)
    scores.fitting.sort(key=lambda found: (found.seconds, found.name))
    return scores


def score_neighbours(request: TuneRequest, candidate: Candidate) -> list[Scored]:
    """The neighbours of a candidate with their closed forms, the fastest first."""
    dims = request.dims
    found = [_scored(one, _closed_form(request, dims, one)) for one in neighbours(request, candidate)]
    return sorted(found, key=lambda one: (one.seconds, one.name))


def _closed_form(request: TuneRequest, dims: Dimensions, candidate: Candidate) -> Option:
    job = job_of(candidate.strategy, request.model.values, request.batch_size, candidate.accumulate)
    return evaluate(dims, job, request.plan.cluster)


def _scored(candidate: Candidate, option: Option) -> Scored:
    return Scored(candidate, candidate.name, option.seconds, option.peak_bytes)


def _fewer_layers(request: TuneRequest, recomputed: Candidate, plain: Option, full: Option) -> Iterator[Candidate]:
    """The candidate with as few recomputed layers of each stage as fit, if some but not all are needed, and with a margin."""
    usable, strategy = request.plan.cluster.usable_bytes, recomputed.strategy
    if plain.peak_bytes <= MARGINS[-1] * usable or not full.fits or strategy.recompute is None:
        return
    layers, kind = layers_per_stage(request.model.values.num_layers, strategy), strategy.recompute.kind
    memories: dict[int, Sequence[StageMemory]] = {0: plain.memory}

    def total(stage: int, count: int) -> float:
        if count not in memories:
            each = Recompute(kind=kind, per_stage=[min(count, one) for one in layers])
            some = with_recompute(recomputed, each)
            job = job_of(some.strategy, request.model.values, request.batch_size, some.accumulate)
            job = replace(job, sorts_rows=plain.job.sorts_rows)  # as on this cluster
            memories[count] = stage_memory(plain.dims, job)
        return memories[count][stage].total

    found = dict.fromkeys(tuple(_fewest(layers, total, usable * margin)) for margin in MARGINS)
    for needed in found:
        if any(needed) and list(needed) != layers:
            yield with_recompute(recomputed, Recompute(kind=kind, per_stage=list(needed)))


def _fewest(layers: Sequence[int], total: Callable[[int, int], float], num_bytes: float) -> Iterator[int]:
    """The fewest layers of each stage with which its `total` is at most `num_bytes`; all of them if that is not enough."""
    for stage, count in enumerate(layers):
        yield bisect.bisect_left(range(count), True, key=lambda tried: total(stage, tried) <= num_bytes)
