# SPDX-License-Identifier: Apache-2.0
"""Second stage of a search: partition a candidate, and simulate its step and its memory. Results are kept in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import milestone
from sporeloom.core.reader import is_a, read_json
from sporeloom.strategy_search.candidates import Candidate
from sporeloom.strategy_search.choice import Choice
from sporeloom.strategy_search.folders import CANDIDATES
from sporeloom.strategy_search.request import SearchRequest
from sporeloom.strategy_search.scoring import Scored
from sporeloom.strategy_search.subjects import subject_of

GB = 2**30
FIELDS = {"seconds": float, "peak_bytes": int, "problem": str}
"""Fields of a result, and their types."""
MAX_VARIATIONS = 8
"""Number of simulations, at most a fourth of all, that vary what closed forms do not see of the fastest candidate."""

SLOWER = 1.1
"""Ratio of closed forms up to which a neighbour may be faster by simulation."""


@dataclass(frozen=True)
class Simulated:
    """A simulated candidate."""

    scored: Scored
    seconds: float
    peak_bytes: int
    """Memory of the worst rank: the pool that holds all allocations of a step."""
    problem: str = ""
    """Why it is refused; empty otherwise."""
    goodput: float | None = None

    @property
    def name(self) -> str:
        """Name of the candidate."""
        return self.scored.name


def simulate_all(request: SearchRequest, fitting: Sequence[Scored], limit: int, out: Path) -> Iterator[Simulated]:
    """Simulate up to `limit` of the candidates that fit in closed form, apart from those whose results are in `out`. A fourth
    are neighbours of the fastest that fits, and the last ones variations of it that closed forms do not see, as long as there
    are some."""
    choice, found = Choice(fitting, request.cluster.usable_bytes), dict[str, Simulated]()
    varied = min(MAX_VARIATIONS, limit // 4)
    for number in range(1, limit + 1):
        left = limit - number if choice.left else -1  # simulations after this one
        variation = _variation(request, found) if left < varied else None
        scored = variation or (_neighbour(request, choice, found) if left < varied + limit // 4 else None)
        if (scored := scored or choice.next()) is None:
            return
        one, source = _result(request, scored, out)
        shown = one.problem or f"{one.seconds:.4g} s, {one.peak_bytes / GB:.2f} GB"
        milestone(f"2/3 simulated {number} of {limit}: {scored.name}: {shown}{source}")
        if one.peak_bytes and scored.peak_bytes and not variation:
            choice.learn(scored, one.peak_bytes)
        choice.leave_out(one.name)
        found[one.name] = one
        yield one


def _best(found: Mapping[str, Simulated]) -> Simulated | None:
    """The fastest candidate that fits."""
    fitting = [one for one in found.values() if not one.problem]
    return min(fitting, key=lambda one: (one.seconds, one.peak_bytes, one.name), default=None)


def _variation(request: SearchRequest, found: Mapping[str, Simulated]) -> Scored | None:
    """A variation of the fastest candidate that fits which has not been simulated."""
    if (fastest := _best(found)) is None:
        return None
    best = fastest.scored
    changed = (replace(best, candidate=each, name=each.name) for each in subject_of(request).variations(best.candidate))
    return next((scored for scored in changed if scored.name not in found), None)


def _neighbour(request: SearchRequest, choice: Choice, found: Mapping[str, Simulated]) -> Scored | None:
    """The neighbour of the fastest candidate that fits which is expected to fit and to be fastest, and has not been
    simulated; None: in closed form all others are clearly slower."""
    if (fastest := _best(found)) is None:
        return None
    expected = (
        one
        for one in subject_of(request).neighbours(fastest.scored.candidate)
        if one.name not in found and choice.expected_bytes(one) <= choice.usable_bytes
    )
    return next((one for one in expected if one.seconds <= SLOWER * fastest.scored.seconds), None)


def _result(request: SearchRequest, scored: Scored, out: Path) -> tuple[Simulated, str]:
    """The result of a candidate, and a remark if it was in `out`."""
    text = request.text(scored.candidate)
    path, record = (out / CANDIDATES / f"{scored.name}.{kind}" for kind in ("yaml", "json"))
    key, source = request.key(scored.candidate), " (kept)"
    values = kept(record, key, FIELDS)
    write_if_other(path, text)
    if values is None:
        values, source = {"key": key, **simulate(request, scored.candidate, path)}, ""
        write_text_atomically(record, json_text(values, indent=1) + "\n")
    return Simulated(scored, values["seconds"], values["peak_bytes"], values["problem"]), source


def kept(record: Path, key: str, fields: Mapping[str, type]) -> dict[str, Any] | None:
    """The result of an evaluation with the same inputs; None: there is none, or it is damaged.

    Args:
        fields: that it has, and their types.
    """
    try:
        values: dict[str, Any] = read_json(record).mapping
    except ConfigError:
        return None
    is_complete = all(name in values and is_a(values[name], kind) for name, kind in fields.items())
    return values if is_complete and values.get("key") == key else None


def write_if_other(path: Path, text: str) -> None:
    """Write a file unless it has this text."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text_atomically(path, text)


def simulate(request: SearchRequest, candidate: Candidate, path: Path) -> dict[str, Any]:
    """Partition a candidate and simulate a step: its seconds, the memory of the worst rank, and why it is refused.

    Args:
        path: its strategy file.

    Raises:
        ConfigError: the process that partitions was ended from outside.
    """
    cluster = request.cluster
    try:
        cost = subject_of(request).step_cost(candidate, path)
    except ConfigError as error:
        if isinstance(error.__context__, BrokenProcessPool):  # for lack of memory here: says nothing about the strategy
            raise
        return {"seconds": 0.0, "peak_bytes": 0, "problem": f"cannot be partitioned: {error.problems[0]}"}
    problem = ""
    if cost.peak_bytes > cluster.usable_bytes:
        problem = (
            f"does not fit: rank {cost.worst_rank} needs {cost.peak_bytes / GB:.2f} GB on a device that has "
            f"{cluster.usable_bytes / GB:.1f} GB to use"
        )
    return {"seconds": cost.seconds, "peak_bytes": cost.peak_bytes, "problem": problem}
