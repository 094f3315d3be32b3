# SPDX-License-Identifier: Apache-2.0
"""Check the graphs of the full size, compare memory with the chip, and estimate the time of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sporeloom.certification.config import Certification
from sporeloom.certification.shrink import rows_on_full_mesh
from sporeloom.dry_run.pool import compile_ranks
from sporeloom.dry_run.summary import GB, summarize
from sporeloom.planner.closed_forms import job_of
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.graph_time import graph_time
from sporeloom.planner.report import as_dict
from sporeloom.planner.search import evaluate
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.schedule import idle_microbatches


def dry_run(certification: Certification) -> dict[str, Any]:
    """Report the first, the middle and the last rank, as `sporeloom dry-run` does.

    Raises:
        ConfigError: the model cannot be partitioned, or a shard of a parameter is not the one that the rules define.
    """
    return summarize(certification.full, compile_ranks(certification.full))


def group_problems(ranks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """List ranks that communicate over a group of which they are not members."""
    for rank in ranks:
        for name, members in rank["groups"].items():
            if rank["rank"] not in members:
                yield f"rank {rank['rank']} is not in group {name}, over which it communicates"


def state_problems(ranks: Sequence[dict[str, Any]], memory_gb: float) -> Iterator[str]:
    """List ranks whose weights, gradients and moments alone exceed the memory of a device."""
    for rank in ranks:
        held = sum(rank[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer"))
        if held > memory_gb * GB:
            yield (
                f"rank {rank['rank']} needs {held / GB:.2f} GB for weights, gradients and moments alone, on a device of "
                f"{memory_gb:g} GB"
            )


def memory_problems(values: dict[str, Any], usable_bytes: float) -> Iterator[str]:
    """List stages that exceed the usable memory of a device."""
    for stage in values["job"]["stages"]:
        if stage["total_bytes"] > usable_bytes:
            yield (
                f"stage {stage['stage']} needs {stage['total_bytes'] / GB:.2f} GB on a device that has "
                f"{usable_bytes / GB:.1f} GB to use"
            )


def custom_estimate(ranks: Sequence[dict[str, Any]], strategy: Strategy, rows: int, cluster: Cluster) -> dict[str, Any]:
    """Estimate the time of a step of a custom network: that of the slowest of its partitioned ranks.

    Args:
        rows: rows of the batch.
    """
    rows, pipeline, pp = rows_on_full_mesh(strategy, rows), strategy.pipeline, strategy.mesh.pp
    microbatches = ranks[0]["num_microbatches"]
    idle = pp - 1.0  # a batch that is not divided goes from stage to stage
    if microbatches > 1:
        idle = idle_microbatches(pp, microbatches, pipeline.virtual_stages, pipeline.order) / microbatches
    times = [
        graph_time(
            sum(rank["flops"].values()),
            rank["passed_bytes"],
            [(c["count"], c["kind"], c["bytes_each"], rank["groups"][c["group"]]) for c in rank["collectives"]],
            cluster,
            in_float32=rank["in_float32"],
            idle=idle,
            stage_size=strategy.mesh.stage_size,
            devices=strategy.mesh.size,
        )
        for rank in ranks
    ]
    slowest = max(times, key=lambda time: time.total)
    seconds = dict(vars(slowest))
    return {"step_time_s": slowest.total, "rows_per_s": rows / slowest.total, "chip": cluster.chip, "seconds": seconds}


def estimate(certification: Certification) -> dict[str, Any]:
    """Estimate time and memory of a step by the planner, with the interval of the time."""
    full = certification.full
    dims = of_decoder(full.model, full.seq_len, full.task.has_drops)
    job = job_of(full.strategy, full.model, full.batch_size, full.config.accumulate)
    option = evaluate(dims, job, certification.cluster, full.task)
    values = as_dict(option, option, certification.cluster, full.task)
    return {key: value for key, value in values.items() if key != "why_slower"}
