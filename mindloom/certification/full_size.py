# SPDX-License-Identifier: Apache-2.0
"""The graphs of the full size against what the strategy implies, the memory against the chip, the time by the planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindloom.certification.config import Certification
from mindloom.dry_run.config import DryRun
from mindloom.dry_run.pool import compile_ranks
from mindloom.dry_run.summary import GB, summarize
from mindloom.planner.closed_forms import collective_bytes, job_of, parameter_bytes
from mindloom.planner.cluster import published_error
from mindloom.planner.dimensions import of_decoder
from mindloom.planner.report import as_dict
from mindloom.planner.search import evaluate

LIMIT = 0.01
"""Of bytes: tables of the closed forms leave out what is a few bytes a step."""


def dry_run(asked: Certification) -> dict[str, Any]:
    """The report of tools/dry_run.py for the first, the middle and the last rank."""
    return summarize(asked.full, compile_ranks(asked.full))


def implied(full: DryRun) -> dict[str, Any]:
    """By stage, what the strategy implies: parameter bytes and bytes of collectives, by the closed forms."""
    dims = of_decoder(full.model, full.seq_len)
    job = job_of(full.strategy, full.model, full.batch_size, full.config.accumulate)
    return {
        "parameter_bytes": parameter_bytes(dims, job),
        "bytes_per_step": [collective_bytes(dims, job, stage) for stage in range(job.pp)],
    }


def differences(values: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    """What compiled ranks hold or send otherwise than implied."""
    for rank in values["ranks"]:
        where, stage = f"rank {rank['rank']}", rank["stage"]
        held, foretold = rank["parameter_bytes"], expected["parameter_bytes"][stage]
        if abs(held - foretold) > LIMIT * foretold:
            yield f"{where} holds {held:,} bytes of parameters; the strategy implies {foretold:,}"
        sent, implied_bytes = rank["bytes_per_step"], expected["bytes_per_step"][stage]
        for kind in dict.fromkeys([*implied_bytes, *sent]):
            a, b = implied_bytes.get(kind, 0), sent.get(kind, 0)
            if abs(a - b) > LIMIT * max(a, b):
                yield f"{where}: {kind}, {b:,.0f} bytes a step; the strategy implies {a:,.0f}"
        for name, members in rank["groups"].items():
            if rank["rank"] not in members:
                yield f"{where} is not in group {name}, over which it communicates"


def memory_problems(values: dict[str, Any], usable_bytes: float) -> Iterator[str]:
    for stage in values["job"]["stages"]:
        if stage["total_bytes"] > usable_bytes:
            yield (
                f"stage {stage['stage']} needs {stage['total_bytes'] / GB:.2f} GB on a device that has "
                f"{usable_bytes / GB:.1f} GB to use"
            )


def estimate(asked: Certification) -> dict[str, Any]:
    """Time and memory of a step by the planner, with its published error."""
    full = asked.full
    dims = of_decoder(full.model, full.seq_len)
    option = evaluate(dims, job_of(full.strategy, full.model, full.batch_size, full.config.accumulate), asked.cluster)
    values = as_dict(option, option)
    return {
        **{key: value for key, value in values.items() if key != "why_slower"},
        "error": published_error(bool(dims.num_experts)),
    }
