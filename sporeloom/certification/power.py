# SPDX-License-Identifier: Apache-2.0
"""The power of a proof: how many of the faults planted in the program under proof it catches, by kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sporeloom.certification.config import Certification
from sporeloom.certification.proof import LIMITS, ONE_DEVICE, Trained, compare, load, prove
from sporeloom.certification.shrink import small_model, small_strategies
from sporeloom.partition.faults import KIND_NAMES
from sporeloom.strategy.config import Strategy

CAUGHT, ESCAPED, WITHOUT_EFFECT = "caught", "escaped", "without effect"
MIN_PROCESSES = 2
"""Processes of the smallest proof."""
MAX_FAULTS = 16
"""Faults of each kind that are planted in the search for the smallest escape."""


@dataclass(frozen=True)
class Outcome:
    """The verdict of the proof on a program with one planted fault."""

    kind: str
    mesh: str
    part: str
    """The graph in which it was planted."""
    operator: str
    outcome: Literal["caught", "escaped", "without effect"]
    """`without effect`: every number that the proof compares is bit for bit that of the right program."""
    details: str
    """The first difference that the proof names, or the largest differences, which are within its tolerances."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.operator} ({self.part}, {self.mesh}): {self.details}"


def measure(certification: Certification, subject: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Judge the faulty programs of a proof in `folder`, and look for escapes on smaller meshes."""
    found = outcomes(folder, certification.small)
    escaped = [each for each in found if each.outcome == ESCAPED]
    smaller = _on_two_processes(certification, subject, folder / "two_processes", escaped)
    return summarize(found, smaller)


def _on_two_processes(
    certification: Certification, subject: Mapping[str, Any], folder: Path, escaped: Sequence[Outcome]
) -> list[Outcome]:
    """Escapes of the same kinds from the same layers on meshes of two processes, which have one axis each."""
    if not escaped or certification.config.processes == MIN_PROCESSES:
        return []
    full, places = certification.full, {(each.kind, _place(each.operator)) for each in escaped}
    small = small_strategies(full.strategy, full.model.num_layers, MIN_PROCESSES)
    folder.mkdir()
    kinds = sorted({each.kind for each in escaped})
    about = {**subject, "processes": MIN_PROCESSES, "faults": MAX_FAULTS, "kinds": kinds}
    (folder / "subject.json").write_text(json.dumps(about))
    (folder / "model.json").write_text(json.dumps(small_model(full.model, full.strategy, MIN_PROCESSES).to_dict()))
    if any(proof.failure for proof in prove(folder, small, certification.config.out / "logs" / folder.name)[1]):
        return []
    again = [each for each in outcomes(folder, small) if each.outcome == ESCAPED]
    return [each for each in again if (each.kind, _place(each.operator)) in places]


def _place(operator: str) -> str:
    return operator.rpartition(" at ")[2]


def outcomes(folder: Path, small: Sequence[Strategy]) -> list[Outcome]:
    """Judge the faulty programs whose results are in the folder of a proof, by the comparison of the proof."""
    expected, found = load(folder, ONE_DEVICE), list[Outcome]()
    for number, strategy in enumerate(small):
        right, mesh = load(folder, str(number)), str(strategy.mesh)
        for position, site in enumerate(json.loads((folder / f"{number}.faults.json").read_text())):
            if site["error"]:
                judged: tuple[Any, str] = (CAUGHT, site["error"])
            else:
                judged = _judge(expected, right, load(folder, f"{number}-{position}"), mesh)
            found.append(Outcome(site["kind"], mesh, site["part"], site["description"], *judged))
    return found


def _judge(expected: Trained, right: Trained, faulty: Trained, mesh: str) -> tuple[str, str]:
    proof = compare(mesh, expected, faulty)
    if proof.failure:
        return CAUGHT, proof.failure
    if _is_equal(right, faulty):
        return WITHOUT_EFFECT, ""
    shares = {kind: proof.differences[kind] / LIMITS[kind] for kind in proof.differences}
    largest = max(shares, key=shares.__getitem__)
    return ESCAPED, f"{largest} differ by {proof.differences[largest]:.1e}, at most {LIMITS[largest]:.0e}"


def _is_equal(a: Trained, b: Trained) -> bool:
    pairs = zip((a.gradients, a.weights), (b.gradients, b.weights), strict=True)
    return a.numbers == b.numbers and all(
        one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
        for one, other in pairs
    )


def summarize(found: Sequence[Outcome], smaller: Sequence[Outcome] = ()) -> dict[str, Any]:
    """The part of a certificate about planted faults.

    Args:
        smaller: escapes on the smallest meshes.
    """
    kinds = []
    for name in KIND_NAMES:
        of_kind = [each for each in found if each.kind == name]
        counts = {what: sum(each.outcome == what for each in of_kind) for what in (CAUGHT, ESCAPED, WITHOUT_EFFECT)}
        kinds.append({"kind": name, "planted": len(of_kind), **counts})
    return {
        "planted": len(found),
        "caught": sum(each.outcome == CAUGHT for each in found),
        "kinds": kinds,
        "faults": [asdict(each) for each in found],
        "smallest_escapes": [asdict(each) for each in smaller],
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """The report of planted faults, for the terminal: a row a kind, then escapes."""
    rows = [row for row in summary["kinds"] if row["planted"]]
    width = max((len(row["kind"]) for row in rows), default=0)
    head = f"{'fault':{width}}  planted  caught  escaped  without effect"
    table = [
        f"{row['kind']:{width}}  {row['planted']:7}  {row[CAUGHT]:6}  {row[ESCAPED]:7}  {row[WITHOUT_EFFECT]:14}"
        for row in rows
    ]
    missing = [row["kind"] for row in summary["kinds"] if not row["planted"]]
    escapes = [Outcome(**each) for each in summary["faults"] if each["outcome"] == ESCAPED]
    return [
        f"planted faults: {summary['caught']} of {summary['planted']} caught",
        head,
        *table,
        *(f"escaped: {each}" for each in escapes),
        *(f"escaped on two processes, too: {Outcome(**each)}" for each in summary["smallest_escapes"]),
        *([f"no operator of the program fits {len(missing)} kinds: {'; '.join(missing)}"] if missing else []),
    ]
