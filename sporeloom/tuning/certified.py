# SPDX-License-Identifier: Apache-2.0
"""Third stage of a search: certificates for the points of the Pareto front, the fastest first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sporeloom.certification.config import Certification, CertifyConfig, check
from sporeloom.certification.verdict import certify_decoder
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import remove, write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import milestone
from sporeloom.strategy.certificate import CERTIFIED, check_certificate, covered_settings
from sporeloom.tuning.front import pareto
from sporeloom.tuning.request import TuneRequest
from sporeloom.tuning.simulated import GB, Simulated, kept

POINTS, REFUSED = "points", "refused"
STRATEGY, CERTIFICATE, RESULT = "strategy.yaml", "certificate.json", "result.json"


@dataclass
class Front:
    """The Pareto front, and the candidates that were refused."""

    points: list[Simulated]
    """The fastest first."""
    certified: set[str] = field(default_factory=set)
    """Names of the points with certificates."""
    refused: list[Simulated] = field(default_factory=list)
    """Candidates that cannot run: with the reason, or the counterexample of the certificate."""


def front_of(found: Sequence[Simulated]) -> list[Simulated]:
    """The Pareto front of step time, memory of the worst rank and goodput, the fastest first."""
    ordered = sorted(found, key=lambda one: (one.seconds, one.peak_bytes, one.name))
    return [ordered[n] for n in pareto([(o.seconds, o.peak_bytes, -(o.goodput or 0.0)) for o in ordered])]


def certify_front(request: TuneRequest, simulated: Sequence[Simulated], limit: int, processes: int, out: Path) -> Front:
    """Certify up to `limit` points. One whose certificate is refused leaves the front to those that it dominated."""
    alive = [one for one in simulated if not one.problem]
    front = Front(front_of(alive), refused=[one for one in simulated if one.problem])
    while len(front.certified) < limit:
        point = next((one for one in front.points if one.name not in front.certified), None)
        if point is None:
            break
        problem = _certify(request, point, processes, out)
        if not problem:
            front.certified.add(point.name)
            milestone(f"3/3 certified {len(front.certified)} of at most {limit}: {point.name}")
            continue
        milestone(f"3/3 refused {point.name}: {problem}")
        front.refused.append(replace(point, problem=f"certificate refused: {problem}"))
        alive = [one for one in alive if one.name != point.name]
        front.points = front_of(alive)
    _write_points(request, front, out)
    return front


def _certify(request: TuneRequest, point: Simulated, processes: int, out: Path) -> str:
    """Certify a point, unless `out` has the result for the same inputs. Returns why it is refused, or ''."""
    candidate, model = point.scored.candidate, request.model
    text = candidate.text(model.values)
    key = request.key(text, candidate.accumulate)
    for folder in (out / POINTS / point.name, out / REFUSED / point.name):
        values = kept(folder / RESULT, key)
        if values and values["processes"] == processes and (folder / STRATEGY).is_file():
            try:
                certification = _certification(request, point, folder, processes)
                if not values["problem"]:
                    check_certificate(folder / CERTIFICATE, _covered(certification))
                return str(values["problem"])
            except ConfigError:
                continue  # incomplete or changed: certified again
    folder = out / POINTS / point.name
    for old in (folder, out / REFUSED / point.name):
        remove(old)
    folder.mkdir(parents=True)
    write_text_atomically(folder / STRATEGY, _text(request, point))
    problem = ""
    try:
        made = certify_decoder(_certification(request, point, folder, processes))
        problem = "" if made["verdict"] == CERTIFIED else str(made["reasons"][0])
    except ConfigError as error:
        problem = error.problems[0]
    values = {"key": key, "processes": processes, "problem": problem}
    write_text_atomically(folder / RESULT, json_text(values, indent=1) + "\n")
    if problem:
        (out / REFUSED).mkdir(exist_ok=True)
        folder.rename(out / REFUSED / point.name)
    return problem


def _certification(request: TuneRequest, point: Simulated, folder: Path, processes: int) -> Certification:
    model = request.model
    return check(
        CertifyConfig(
            model=model.family,
            size=model.size,
            config=model.config,
            strategy=folder / STRATEGY,
            cluster=request.cluster_file,
            out=folder,
            batch_size=request.batch_size,
            seq_len=request.seq_len,
            accumulate=point.scored.candidate.accumulate,
            compute_dtype=model.compute_dtype,
            attention=model.attention,
            processes=processes,
            fast=True,
        )
    )


def _covered(certification: Certification) -> dict[str, object]:
    config, full = certification.config, certification.full
    batch = full.batch_size, full.seq_len, config.accumulate
    return covered_settings(config.model, full.model, full.strategy, *batch)


def _text(request: TuneRequest, point: Simulated) -> str:
    """The strategy file of a point, headed by its figures and the command that trains with it."""
    candidate, model, plan = point.scored.candidate, request.model, request.plan
    accumulate = [f"--accumulate {candidate.accumulate}"] if candidate.accumulate > 1 else []
    attention = [f"--attention {model.attention}"] if model.attention else []
    flags = [
        f"--model {model.family} --size {model.size} --batch-size {request.batch_size} --seq-len {request.seq_len}",
        f"--compute-dtype {model.compute_dtype}",
        *([f"--config {model.config}"] if model.config else []),
        *attention,
        *accumulate,
    ]
    head = [
        f"# Tuned for {plan.devices} {plan.cluster.device_name}: simulated step {point.seconds:.4g} s, "
        f"{point.peak_bytes / GB:.2f} GB of the {plan.cluster.usable_bytes / GB:.1f} GB that a device has to use.",
        f"# sporeloom train --data DATA --strategy {STRATEGY} {' '.join(flags)}",
    ]
    return candidate.text(model.values, head)


def _write_points(request: TuneRequest, front: Front, out: Path) -> None:
    """Write the strategies of points without certificates, and remove folders of earlier fronts."""
    for point in front.points:
        if point.name not in front.certified:
            folder = out / POINTS / point.name
            with contextlib.suppress(FileNotFoundError):
                (folder / CERTIFICATE).unlink()
            folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(folder / STRATEGY, _text(request, point))
    names = {POINTS: {one.name for one in front.points}, REFUSED: {one.name for one in front.refused}}
    for kind, current in names.items():
        for folder in sorted((out / kind).glob("*")):
            if folder.name not in current:
                remove(folder)
