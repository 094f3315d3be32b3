# SPDX-License-Identifier: Apache-2.0
"""Second stage of a search: partition a candidate, and simulate its step and its memory. Results are kept in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import milestone
from sporeloom.core.reader import is_a, read_json
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.pool import compile_ranks
from sporeloom.strategy_search.candidates import Candidate
from sporeloom.strategy_search.choice import Choice
from sporeloom.strategy_search.folders import CANDIDATES
from sporeloom.strategy_search.request import TuneRequest
from sporeloom.strategy_search.scoring import Scored

GB = 2**30
FIELDS = {"seconds": float, "peak_bytes": int, "problem": str}
"""Fields of a result, and their types."""


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


def simulate_all(request: TuneRequest, fitting: Sequence[Scored], limit: int, out: Path) -> Iterator[Simulated]:
    """Simulate up to `limit` of the candidates that fit in closed form, apart from those whose results are in `out`."""
    choice = Choice(fitting, request.plan.cluster.usable_bytes)
    limit = min(limit, len(fitting))
    for number in range(1, limit + 1):
        scored = choice.next()
        assert scored
        text = scored.candidate.text(request.model.values)
        path, record = (out / CANDIDATES / f"{scored.name}.{kind}" for kind in ("yaml", "json"))
        key = request.key(text, scored.candidate.accumulate)
        values = kept(record, key, FIELDS)
        source = ""
        write_if_other(path, text)
        if values is None:
            values = {"key": key, **simulate(request, scored.candidate, path)}
            write_text_atomically(record, json_text(values, indent=1) + "\n")
        else:
            source = " (kept)"
        found = Simulated(scored, values["seconds"], values["peak_bytes"], values["problem"])
        shown = found.problem or f"{found.seconds:.4g} s, {found.peak_bytes / GB:.2f} GB"
        milestone(f"2/3 simulated {number} of {limit}: {scored.name}: {shown}{source}")
        if found.peak_bytes:
            choice.learn(scored, found.peak_bytes)
        yield found


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


def dry_run_flags(request: TuneRequest, candidate: Candidate, path: Path) -> DryRunConfig:
    """Flags of the dry run of a candidate. `path`: its strategy file."""
    model = request.model
    return DryRunConfig(
        model=model.family,
        size=model.size,
        config=model.config,
        strategy=path,
        ranks="all",
        batch_size=request.batch_size,
        seq_len=request.seq_len,
        accumulate=candidate.accumulate,
        compute_dtype=model.compute_dtype,
        attention=model.attention,
        memory=True,
        time=True,
        cluster=request.cluster_file,
        devices_per_server=request.plan.cluster.devices_per_node,
    )


def simulate(request: TuneRequest, candidate: Candidate, path: Path) -> dict[str, Any]:
    """Partition a candidate and simulate a step: its seconds, the memory of the worst rank, and why it is refused.

    Args:
        path: its strategy file.

    Raises:
        ConfigError: the process that partitions was ended from outside.
    """
    cluster = request.plan.cluster
    try:
        run = check(dry_run_flags(request, candidate, path))
        reports = compile_ranks(run)
    except ConfigError as error:
        if isinstance(error.__context__, BrokenProcessPool):  # for lack of memory here: says nothing about the strategy
            raise
        return {"seconds": 0.0, "peak_bytes": 0, "problem": f"cannot be partitioned: {error.problems[0]}"}
    step = reports[0].step
    assert step
    seconds = max(of.end for of in step.values())
    peaks = {report.rank: report.memory.pool_bytes for report in reports if report.memory}
    rank = max(peaks, key=lambda rank: (peaks[rank], -rank))
    problem = ""
    if peaks[rank] > cluster.usable_bytes:
        problem = (
            f"does not fit: rank {rank} needs {peaks[rank] / GB:.2f} GB on a device that has "
            f"{cluster.usable_bytes / GB:.1f} GB to use"
        )
    return {"seconds": seconds, "peak_bytes": peaks[rank], "problem": problem}
