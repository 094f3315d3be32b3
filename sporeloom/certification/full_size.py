# SPDX-License-Identifier: Apache-2.0
"""The graphs of the full size against what the strategy implies, the memory against the chip, the time by the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sporeloom.certification.config import Certification
from sporeloom.certification.shrink import rows_on_the_whole_mesh
from sporeloom.dry_run.config import DryRun
from sporeloom.dry_run.pool import compile_ranks
from sporeloom.dry_run.summary import GB, summarize
from sporeloom.planner.closed_forms import job_of, parameter_bytes
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.graph_time import graph_time
from sporeloom.planner.report import as_dict
from sporeloom.planner.search import evaluate
from sporeloom.planner.task import adapter_parameters
from sporeloom.planner.task_traffic import objective_bytes, task_traffic
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.schedule import idle_microbatches

LIMIT = 0.01
"""Of bytes: tables of the closed forms leave out what is a few bytes a step."""


def dry_run(asked: Certification) -> dict[str, Any]:
    """The report of tools/dry_run.py for the first, the middle and the last rank."""
    return summarize(asked.full, compile_ranks(asked.full))


def implied(full: DryRun) -> dict[str, Any]:
    """By stage, what the strategy implies: parameter bytes and bytes of collectives, by the closed forms; of adapters also
    the least there can be."""
    dims = of_decoder(full.model, full.seq_len, full.task.has_drops)
    job = job_of(full.strategy, full.model, full.batch_size, full.config.accumulate)
    sizes, adapters = parameter_bytes(dims, job), adapter_parameters(full.task, dims, job)
    bounds = [task_traffic(full.task, dims, job, stage) for stage in range(job.pp)]
    return {
        "least_parameter_bytes": sizes,
        "parameter_bytes": [size + 4 * count for size, count in zip(sizes, adapters, strict=True)],
        "least_bytes_per_step": [least for least, _ in bounds],
        "bytes_per_step": [most for _, most in bounds],
        "of_objective": [objective_bytes(full.task, dims, job)] * job.pp,
    }


def differences(values: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    """What compiled ranks hold or send otherwise than implied.

    The closed forms are of MindSpore's partitioner. Of `engine: spmd` a dry run has compared the parameters with the rules,
    and the graph is made by the code that the proof ran.
    """
    if values["job"]["engine"] == "spmd":
        yield from strangers(values["ranks"])
        return
    for rank in values["ranks"]:
        where, stage = f"rank {rank['rank']}", rank["stage"]
        held = rank["parameter_bytes"]
        least, most = expected["least_parameter_bytes"][stage], expected["parameter_bytes"][stage]
        if not _is_within(held, least, most):
            yield f"{where} holds {held:,} bytes of parameters; the strategy implies {_bounds(least, most)}"
        sent, few = rank["bytes_per_step"], expected["of_objective"][stage]
        lowest, highest = expected["least_bytes_per_step"][stage], expected["bytes_per_step"][stage]
        for kind in dict.fromkeys([*highest, *sent]):
            least, most, found = lowest.get(kind, 0), highest.get(kind, 0), sent.get(kind, 0)
            if not _is_within(found, least - few, most + few):
                yield f"{where}: {kind}, {found:,.0f} bytes a step; the strategy implies {_bounds(least, most)}"
    yield from strangers(values["ranks"])


def strangers(ranks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Ranks that communicate over a group they are not in."""
    for rank in ranks:
        for name, members in rank["groups"].items():
            if rank["rank"] not in members:
                yield f"rank {rank['rank']} is not in group {name}, over which it communicates"


def held_problems(ranks: Sequence[dict[str, Any]], memory_gb: float) -> Iterator[str]:
    """Ranks whose weights, gradients and moments alone are more than a device has."""
    for rank in ranks:
        held = sum(rank[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer"))
        if held > memory_gb * GB:
            yield (
                f"rank {rank['rank']} needs {held / GB:.2f} GB for weights, gradients and moments alone, on a device of "
                f"{memory_gb:g} GB"
            )


def _is_within(found: float, least: float, most: float) -> bool:
    return least - LIMIT * max(least, found) <= found <= most + LIMIT * max(most, found)


def _bounds(least: float, most: float) -> str:
    return f"{most:,.0f}" if least == most else f"{least:,.0f} to {most:,.0f}"


def own_estimate(ranks: Sequence[dict[str, Any]], strategy: Strategy, rows: int, cluster: Cluster) -> dict[str, Any]:
    """Time of a step of `rows` of a user's network, of the slowest of its compiled ranks."""
    rows, pipeline, microbatches = rows_on_the_whole_mesh(strategy, rows), strategy.pipeline, strategy.num_parts()
    order = strategy.mesh.pp, microbatches, pipeline.virtual_stages, pipeline.order
    idle = idle_microbatches(*order) / microbatches if strategy.mesh.pp > 1 else 0.0
    times = [
        graph_time(
            sum(rank["flops"].values()),
            rank["passed_bytes"],
            [(c["kind"], c["count"] * c["bytes_each"], rank["groups"][c["group"]]) for c in rank["collectives"]],
            cluster,
            in_float32=rank["in_float32"],
            idle=idle,
        )
        for rank in ranks
    ]
    slowest = max(times, key=lambda time: time.total)
    seconds = dict(vars(slowest))
    return {"step_time_s": slowest.total, "rows_per_s": rows / slowest.total, "chip": cluster.chip, "seconds": seconds}


def memory_problems(values: dict[str, Any], usable_bytes: float) -> Iterator[str]:
    for stage in values["job"]["stages"]:
        if stage["total_bytes"] > usable_bytes:
            yield (
                f"stage {stage['stage']} needs {stage['total_bytes'] / GB:.2f} GB on a device that has "
                f"{usable_bytes / GB:.1f} GB to use"
            )


def estimate(asked: Certification) -> dict[str, Any]:
    """Time and memory of a step by the planner, with the interval of the time."""
    full = asked.full
    dims = of_decoder(full.model, full.seq_len, full.task.has_drops)
    job = job_of(full.strategy, full.model, full.batch_size, full.config.accumulate)
    option = evaluate(dims, job, asked.cluster, full.task)
    values = as_dict(option, option, asked.cluster, full.task)
    return {key: value for key, value in values.items() if key != "why_slower"}
