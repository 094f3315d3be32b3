# SPDX-License-Identifier: Apache-2.0
"""Third stage of a search: certificates for the points of the Pareto front, the fastest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import milestone
from sporeloom.strategy.certificate import CERTIFIED, check_certificate
from sporeloom.strategy_search.folders import (
    CERTIFICATE,
    POINTS,
    REFUSED,
    RESULT,
    STRATEGY,
    move_strategy,
    remove_proof,
    remove_strategy,
    strategy_folders,
)
from sporeloom.strategy_search.front import pareto
from sporeloom.strategy_search.request import SearchRequest
from sporeloom.strategy_search.simulated import GB, Simulated, kept, write_if_other
from sporeloom.strategy_search.subjects import subject_of


@dataclass
class Front:
    """The Pareto front, and the candidates that were refused."""

    points: list[Simulated]
    """The fastest first."""
    certified: set[str] = field(default_factory=set)
    """Names of the points with certificates."""
    failed: dict[str, str] = field(default_factory=dict)
    """Names of the points whose proof could not be completed on this machine, with the reason."""
    refused: list[Simulated] = field(default_factory=list)
    """Candidates that cannot run: with the reason, or the counterexample of the certificate."""


class Outcome(NamedTuple):
    """Outcome of a proof."""

    verdict: Literal["certified", "refused", "failed"]
    """Failed: it was not completed, which says nothing about the strategy."""
    problem: str = ""


def front_of(found: Sequence[Simulated]) -> list[Simulated]:
    """The Pareto front of step time, memory of the worst rank and goodput, the fastest first."""
    ordered = sorted(found, key=lambda one: (one.seconds, one.peak_bytes, one.name))
    return [ordered[n] for n in pareto([(o.seconds, o.peak_bytes, -(o.goodput or 0.0)) for o in ordered])]


def certify_front(
    request: SearchRequest, simulated: Sequence[Simulated], limit: int, processes: int, out: Path, retry: bool
) -> Front:
    """Certify points until `limit` of them have certificates; valid ones that are in the folder count. A point whose
    certificate is refused leaves the front to those that it dominated.

    Args:
        retry: prove once more what was refused.
    """
    alive = [one for one in simulated if not one.problem]
    front = Front(front_of(alive), refused=[one for one in simulated if one.problem])
    done: set[str] = set()
    while point := next((one for one in front.points if one.name not in done), None):
        done.add(point.name)
        can_prove = len(front.certified) < limit
        outcome = _kept(request, point, out, processes if can_prove else None, retry and can_prove)
        if outcome is None and can_prove:
            outcome = _certify(request, point, processes, out)
        if outcome is None:
            continue
        if outcome.verdict == "certified":
            front.certified.add(point.name)
            milestone(f"3/3 certified {len(front.certified)}: {point.name}")
        elif outcome.verdict == "failed":
            front.failed[point.name] = outcome.problem
            milestone(f"3/3 not certified {point.name}: {outcome.problem}")
        else:
            milestone(f"3/3 refused {point.name}: {outcome.problem}")
            front.refused.append(replace(point, problem=f"certificate refused: {outcome.problem}"))
            alive = [one for one in alive if one.name != point.name]
            front.points = front_of(alive)
    _write_points(request, front, out)
    return front


def _kept(request: SearchRequest, point: Simulated, out: Path, processes: int | None, retry: bool) -> Outcome | None:
    """The outcome of an earlier proof in `out` for the same inputs; None: there is none, or it is damaged.

    Args:
        processes: of the proof; None: any number.
        retry: disregard refusals.
    """
    for kind in (POINTS, REFUSED):
        folder = out / kind / point.name
        values = kept(folder / RESULT, request.key(point.scored.candidate), {"processes": int, "problem": str})
        if values is None or processes not in (None, values["processes"]):
            continue
        problem = values["problem"]
        if bool(problem) != (kind == REFUSED) or (problem and retry):
            continue
        write_if_other(folder / STRATEGY, _text(request, point))
        if problem:
            return Outcome("refused", problem)
        try:
            covered = subject_of(request).covered(point.scored.candidate, folder, values["processes"])
            check_certificate(folder / CERTIFICATE, covered)
            return Outcome("certified")
        except ConfigError:
            continue  # incomplete or changed: certified again
    return None


def _certify(request: SearchRequest, point: Simulated, processes: int, out: Path) -> Outcome:
    """Certify a point. Only a certificate, or a counterexample, leaves a result that is kept."""
    folder, refused = out / POINTS / point.name, out / REFUSED / point.name
    for old in (folder, refused):
        remove_strategy(old)
    write_text_atomically(folder / STRATEGY, _text(request, point))
    try:
        made = subject_of(request).certify(point.scored.candidate, folder, processes)
    except ConfigError as error:
        return Outcome("failed", error.problems[0])
    problem = counterexample(made)
    if made["verdict"] != CERTIFIED and not problem:
        return Outcome("failed", str(made["reasons"][0]))
    if problem:
        move_strategy(folder, refused)
    values = {"key": request.key(point.scored.candidate), "processes": processes, "problem": problem}
    write_text_atomically((refused if problem else folder) / RESULT, json_text(values, indent=1) + "\n")
    return Outcome("refused", problem) if problem else Outcome("certified")


def counterexample(made: Mapping[str, Any]) -> str:
    """The first quantity of a certificate that differs from one device, or problem of its shards or memory; '' if there is
    none, as where processes of the proof were ended from outside."""
    differing = [
        f"{one['mesh']}: {one['failure']}" for one in made["proof"]["meshes"] if one["differences"] and one["failure"]
    ]
    others = [problem for name, problems in made["checks"].items() if name != "proof" for problem in problems]
    return next(iter([*differing, *others]), "")


def _text(request: SearchRequest, point: Simulated) -> str:
    """The strategy file of a point, headed by its figures and by how to train with it."""
    cluster, candidate = request.cluster, point.scored.candidate
    figures = (
        f"Tuned for {request.devices} {cluster.device_name}: simulated step {point.seconds:.4g} s, "
        f"{point.peak_bytes / GB:.2f} GB of the {cluster.usable_bytes / GB:.1f} GB that a device has to use."
    )
    return request.text(candidate, [f"# {line}" for line in (figures, *subject_of(request).how_to_start(candidate))])


def _write_points(request: SearchRequest, front: Front, out: Path) -> None:
    """Write the strategies of points without certificates, and remove those of earlier fronts."""
    for point in front.points:
        if point.name not in front.certified:
            folder = out / POINTS / point.name
            remove_proof(folder, with_logs=point.name not in front.failed)
            write_if_other(folder / STRATEGY, _text(request, point))
    names = {POINTS: {one.name for one in front.points}, REFUSED: {one.name for one in front.refused}}
    for kind, current in names.items():
        for folder in strategy_folders(out, kind):
            if folder.name not in current:
                remove_strategy(folder)
