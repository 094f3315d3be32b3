# SPDX-License-Identifier: Apache-2.0
"""First stage of a search: score every candidate in closed form, and choose those that are simulated."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sporeloom.core.log import progress
from sporeloom.planner.closed_forms import job_of
from sporeloom.planner.memory import StageMemory
from sporeloom.planner.search import Option, evaluate
from sporeloom.strategy.config import Recompute
from sporeloom.strategy.stages import layers_per_stage
from sporeloom.tuning.candidates import Candidate, candidates, meshes, recomputations, with_recompute
from sporeloom.tuning.front import pareto
from sporeloom.tuning.request import TuneRequest

SHARE_BY_TIME = 2 / 3
"""Share of the simulated candidates that are the fastest; the others lie on the front of time and memory."""


@dataclass(frozen=True)
class Scored:
    """A candidate with its closed form."""

    candidate: Candidate
    name: str
    seconds: float
    peak_bytes: float


@dataclass
class Scores:
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


def score(request: TuneRequest, max_meshes: int) -> Scores:
    """Score all candidates on the best meshes."""
    scores, usable = Scores(), request.plan.cluster.usable_bytes
    dims = request.dims
    jobs = meshes(request, max_meshes)
    scores.num_meshes = len(jobs)

    def closed_form(candidate: Candidate) -> Option:
        job = job_of(candidate.strategy, request.model.values, request.batch_size, candidate.accumulate)
        return evaluate(dims, job, request.plan.cluster)

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


def _scored(candidate: Candidate, option: Option) -> Scored:
    return Scored(candidate, candidate.name, option.seconds, option.peak_bytes)


def _fewer_layers(request: TuneRequest, recomputed: Candidate, plain: Option, full: Option) -> Iterator[Candidate]:
    """The candidate with as few recomputed layers of each stage as fit, if some but not all are needed."""
    usable, strategy = request.plan.cluster.usable_bytes, recomputed.strategy
    if plain.fits or not full.fits or strategy.recompute is None:
        return
    layers = layers_per_stage(request.model.values.num_layers, strategy)
    memories: dict[int, Sequence[StageMemory]] = {0: plain.memory}

    def total(stage: int, count: int) -> float:
        if count not in memories:
            each = Recompute(kind=recomputed.strategy.recompute.kind, per_stage=[min(count, one) for one in layers])  # type: ignore[union-attr]
            job = job_of(
                replace(strategy, recompute=each), request.model.values, request.batch_size, recomputed.accumulate
            )
            memories[count] = evaluate(request.dims, job, request.plan.cluster).memory
        return memories[count][stage].total

    needed = [
        bisect.bisect_left(range(count), True, key=lambda tried, stage=stage: total(stage, tried) <= usable)  # type: ignore[misc]
        for stage, count in enumerate(layers)
    ]
    if needed != layers:
        yield with_recompute(recomputed, Recompute(kind=strategy.recompute.kind, per_stage=needed))


def shortlist(scores: Scores, limit: int) -> list[Scored]:
    """The candidates that are simulated: mostly the fastest, then those of the front of time and memory."""
    by_time = scores.fitting[: max(1, round(limit * SHARE_BY_TIME))]
    front = [scores.fitting[n] for n in pareto([(one.seconds, one.peak_bytes) for one in scores.fitting])]
    chosen = {one.name: one for one in (*by_time, *front, *scores.fitting)}
    return sorted(list(chosen.values())[:limit], key=lambda one: (one.seconds, one.name))
