# SPDX-License-Identifier: Apache-2.0
"""Combine compiled ranks with the memory model into the report of a dry run."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

from sporeloom.core.log import counted
from sporeloom.dry_run.config import DryRun
from sporeloom.dry_run.job_command import command_of
from sporeloom.dry_run.memory.shown import lines as memory_lines
from sporeloom.dry_run.rank_report import RankReport
from sporeloom.dry_run.time.report import lines as time_lines
from sporeloom.dry_run.time.report import step_report
from sporeloom.models.parameters import num_parameters
from sporeloom.planner.closed_forms import job_of, parameter_bytes
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.errors import interval_values, time_interval
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parameters import expert_parameters, stage_parameters
from sporeloom.planner.task import adapter_parameters, auxiliary_bytes, task_memory
from sporeloom.strategy.launching import start_lines
from sporeloom.strategy.mesh import Mesh

GB = 2**30


def summarize(run: DryRun, compiled: list[RankReport]) -> dict[str, Any]:
    """Build the report as data: `job`, with every stage by closed formulas, and the requested `ranks`."""
    by_stage = {report.stage: report for report in compiled}
    mesh = run.strategy.mesh
    of_stage = {stage: _stage(run, report) for stage, report in by_stage.items()}
    ranks = [
        _rank(run, by_stage[stage], of_stage[stage], rank)
        for rank in run.ranks
        for stage in [mesh.coordinate(rank, "pp")]
    ]
    values: dict[str, Any] = {"job": _job(run, by_stage), "ranks": ranks}
    if run.cluster and (step := compiled[0].step):
        dims, job = of_decoder(run.model, run.seq_len, run.task.has_drops), _job_of(run)
        adapters = max(adapter_parameters(run.task, dims, job)) if run.task.lora else 0
        values["time"] = step_report(step, dims, job, run.cluster, adapters)
        interval = time_interval(dims, job, run.cluster, run.task)
        values["time"] |= interval_values(interval, values["time"]["seconds"])
    return values


def translate_group(mesh: Mesh, members: list[int], of_rank: int, to_rank: int) -> list[int]:
    """Find the group of `to_rank` that corresponds to a group of `of_rank` in the same stage.

    Along each axis a group has one coordinate, or coordinates at equal distances that fill an aligned block. Where a
    parameter is sharded over a part of its replicas, on several axes, the same is true of the ranks themselves.
    """
    if math.prod(len({mesh.coordinate(rank, axis) for rank in members}) for axis in mesh.order) > len(members):
        first, size = mesh.coordinate(to_rank, "pp") * mesh.stage_size, mesh.stage_size
        return [first + rank for rank in _moved([r % size for r in sorted(members)], to_rank % size)]
    moved = {}
    for axis in mesh.order:
        found = sorted({mesh.coordinate(rank, axis) for rank in members})
        source, target = mesh.coordinate(of_rank, axis), mesh.coordinate(to_rank, axis)
        moved[axis] = [target + found[0] - source] if len(found) == 1 else _moved(found, target)
    coordinates = itertools.product(*moved.values())
    return [mesh.rank_at(dict(zip(moved, found, strict=True))) for found in coordinates]


def _moved(coordinates: list[int], target: int) -> list[int]:
    """Move coordinates at equal distances, which fill an aligned block, to the block that contains `target`."""
    step = coordinates[1] - coordinates[0]
    block = len(coordinates) * step
    return [target // block * block + target % step + i * step for i in range(len(coordinates))]


def _rank(run: DryRun, report: RankReport, values: dict[str, Any], rank: int) -> dict[str, Any]:
    """Report of a rank: the values of its stage, and its groups."""
    groups = {n: translate_group(run.strategy.mesh, g, report.rank, rank) for n, g in report.groups.items()}
    return {**values, "rank": rank, "compiled_as": report.rank, "groups": groups}


def _stage(run: DryRun, report: RankReport) -> dict[str, Any]:
    """Values that all ranks of a stage have in common."""
    dims = of_decoder(run.model, run.seq_len, run.task.has_drops)
    job = _job_of(run)
    memory = task_memory(dims, job, run.task)[report.stage]
    auxiliary = auxiliary_bytes(dims, job, run.task)[report.stage]
    held = report.parameter_bytes + report.optimizer_bytes + job.gradient_copies * report.gradient_bytes
    timeline, report = report.memory, dataclasses.replace(report, memory=None, step=None)
    activations = 0.0 if run.config.inference else memory.activations + memory.working
    copies = memory.weights  # cast, or gathered from the optimizer's shards
    result = {
        **dataclasses.asdict(report),
        "activation_bytes": activations,
        "computing_copy_bytes": copies,
        "auxiliary": auxiliary,
        "auxiliary_bytes": sum(auxiliary.values()),
        "total_bytes": held + activations + copies + sum(auxiliary.values()),
        "collectives": [{**dataclasses.asdict(c), "bytes_per_step": c.bytes_per_step} for c in report.collectives],
        "bytes_per_step": _by_kind(report),
    }
    del result["memory"], result["step"]
    if timeline:
        result["memory"] = timeline.summary()
    if run.config.memory_gb:
        needed = timeline.pool_bytes if timeline else result["total_bytes"]
        result["fits"] = needed <= run.config.memory_gb * GB
        if timeline:
            result["memory"]["fits"] = result["fits"]
    return result


def auxiliary_of_rank(run: DryRun, rank: int) -> dict[str, int]:
    """Auxiliary models and caches that a rank holds during the whole step, by closed formulas."""
    dims, stage = of_decoder(run.model, run.seq_len, run.task.has_drops), run.strategy.mesh.coordinate(rank, "pp")
    return {name: int(size) for name, size in auxiliary_bytes(dims, _job_of(run), run.task)[stage].items()}


def _by_kind(report: RankReport) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for c in report.collectives:
        sizes[f"{c.kind} {c.phase}"] += c.bytes_per_step
    return dict(sizes)


def _job_of(run: DryRun) -> Parallelism:
    return job_of(run.strategy, run.model, run.batch_size, run.config.accumulate, run.task.optimizer_bytes)


def _stages(run: DryRun) -> list[dict[str, Any]]:
    """List every stage by closed formulas, whether compiled or not; tests compare the compiled ones with them."""
    dims = of_decoder(run.model, run.seq_len, run.task.has_drops)
    job = _job_of(run)
    sizes = parameter_bytes(dims, job)
    unsharded = [sum(both) for both in zip(stage_parameters(dims, job), expert_parameters(dims, job), strict=True)]
    tokens = run.batch_size // job.dp * run.seq_len // job.cp
    passes, (dense, sparse) = 1 if run.config.inference else 3, dims.kinds
    computed = dataclasses.replace(job, sorts_rows=job.sorts_rows and not run.config.inference).expert_rows(dims)
    rows = int(dims.experts_per_token * computed * dims.expert_parameters)  # multiplied with a token
    stages = []
    memories = task_memory(dims, job, run.task)
    for stage, (memory, layers) in enumerate(zip(memories, job.stages(dims.num_layers), strict=True)):
        gradients = job.gradient_copies * (4 * unsharded[stage] if job.zero < 2 else sizes[stage])
        trained = (0 if job.optimizer_on_host else 2 * sizes[stage]) + gradients
        if run.task.lora:  # replicated on every rank at worst
            trained = (12 + 4 * job.gradient_copies) * adapter_parameters(run.task, dims, job)[stage]
        training = trained + memory.activations + memory.working + memory.beside
        attention, few = layers * 4 * dims.seq_len * dims.hidden_size, job.expert_layers(dims)[stage]
        matrices = (layers - few) * dense.layer_matrices + few * (sparse.layer_matrices + rows)
        head = 2 * dims.num_outputs * dims.hidden_size if stage == job.last_stage else 0
        stages.append(
            {
                "stage": stage,
                "layers": layers,
                "parameter_bytes": sizes[stage],
                "total_bytes": sizes[stage] + memory.weights + (0 if run.config.inference else training),
                "flops": passes * tokens * (2 * matrices + attention + head) // job.tp,
            }
        )
    return stages


def _job(run: DryRun, by_stage: dict[int, RankReport]) -> dict[str, Any]:
    """Report on the job: balance of the stages, parameters that are replicated though they could be sharded, advice."""
    mesh, strategy, stages = run.strategy.mesh, run.strategy, _stages(run)
    flops = [stage["flops"] for stage in stages]
    values: dict[str, Any] = {
        "model": f"{run.config.model} {run.config.size}",
        "num_parameters": num_parameters(run.model),
        "task": run.task.name,
        "task_details": run.task.describe(),
        "num_adapter_parameters": sum(adapter_parameters(run.task, of_decoder(run.model), _job_of(run))),
        "strategy": str(run.config.strategy),
        "mesh": str(mesh),
        "num_devices": mesh.size,
        "devices_per_server": run.config.devices_per_server,
        "batch_size": run.batch_size,
        "seq_len": run.seq_len,
        "num_microbatches": run.num_microbatches,
        "virtual_stages": strategy.pipeline.virtual_stages,
        "schedule": strategy.pipeline.schedule,
        "engine": "spmd",
        "compute_dtype": run.model.compute_dtype,
        "stages": stages,
        "imbalance": max(flops) / (sum(flops) / len(flops)) - 1,
        "replicated": _replicated(run, by_stage),
        "advice": [],
        "run": start_lines(command_of(run), str(run.config.strategy), mesh.size, run.config.devices_per_server),
    }
    if run.config.memory_gb:
        values["memory_gb"] = run.config.memory_gb
        pools = {stage: report.memory.pool_bytes for stage, report in by_stage.items() if report.memory}
        values["fullest_bytes"] = max(pools.get(number, stage["total_bytes"]) for number, stage in enumerate(stages))
        values["fits"] = values["fullest_bytes"] <= run.config.memory_gb * GB
    if mesh.dp > 1 and not strategy.optimizer_parallel and not run.config.inference and not run.task.lora:
        saved = max(3 * r.parameter_bytes * (mesh.dp - 1) // mesh.dp for r in by_stage.values())
        values["advice"].append(
            f"optimizer_parallel would shard weights and moments over dp {mesh.dp}: {saved / GB:.2f} GB a device less"
        )
    if mesh.uneven_groups:
        values["advice"].append(
            f"{mesh.uneven_groups}: not for the first Ascend 910 (910A), where a group has 1, 2, 4 or 8 devices of a "
            "server, as many of each"
        )
    return values


def _replicated(run: DryRun, by_stage: dict[int, RankReport]) -> list[dict[str, Any]]:
    """List replicated parameters of 1 MB and more one of whose dims a mesh axis divides."""
    mesh, found = run.strategy.mesh, []
    for report in by_stage.values():
        for p in report.parameters:
            if p.local_shape != p.global_shape or p.num_bytes < 2**20 or mesh.stage_size == 1:
                continue
            if any(size % parts == 0 for size in p.global_shape for parts in mesh.sharding_axes.values()):
                found.append({"name": p.name, "bytes": p.num_bytes, "ranks": mesh.stage_size, "rule": p.rule})
    return found


def describe_layout(layout: list[list[str]], shards: int) -> str:
    """Format a layout with a word for each dim, `dp`, `dp,tp` or `~`, and the number of optimizer shards."""
    text = "[" + ", ".join(",".join(dim) or "~" for dim in layout) + "]"
    return text + (f" /{shards}" if shards > 1 else "")


def text_report(values: dict[str, Any]) -> str:
    """Format the report for a terminal."""
    job, lines = values["job"], []
    sequences = counted(job["batch_size"], "sequence", "sequences")
    count = job["num_adapter_parameters"]
    adapters = f", frozen, and {count:,} of adapters" if count else ""
    lines.append(
        f"{job['model']}, {job['num_parameters']:,} parameters{adapters}, {job['mesh']}; {sequences} of "
        f"{job['seq_len']} tokens a step, {counted(job['num_microbatches'], 'microbatch', 'microbatches')}"
        + (f"; {job['task_details']}" if job["task_details"] else "")
        + f"; engine {job['engine']}"
    )
    for rank in values["ranks"]:
        lines += ["", *_rank_lines(rank)]
    fullest = max(job["stages"], key=lambda stage: stage["total_bytes"])
    verdict = "" if "fits" not in job else "; all fit" if job["fits"] else "; that DOES NOT FIT"
    lines += [
        "",
        f"{counted(len(job['stages']), 'stage', 'stages')}: the busiest computes {job['imbalance']:.1%} more than their mean",
    ]
    lines[-1] += (
        f"; the fullest is stage {fullest['stage']} with {fullest['total_bytes'] / GB:.2f} GB a device{verdict}"
    )
    total = sum(p["bytes"] for p in job["replicated"])
    if job["replicated"]:
        lines.append(f"replicated on every rank of a stage though they could be sharded: {total / 2**20:.1f} MB in")
        lines += [f"  {p['name']} {p['bytes'] / 2**20:.1f} MB  {p['rule'] or 'no rule'}" for p in job["replicated"][:8]]
    lines += ["", *time_lines(values["time"])] if "time" in values else []
    lines += [*job["advice"], "", *job["run"]]
    return "\n".join(lines)


def _rank_lines(rank: dict[str, Any]) -> list[str]:
    layers, depths = rank["layers"], rank["compiled_layers"]
    compiled = rank["compiled_as"]
    same = "" if rank["rank"] == compiled else f" (same graph as rank {compiled}, other groups)"
    lines = [
        f"rank {rank['rank']}{same}: stage {rank['stage']}, {counted(len(layers), 'layer', 'layers')}"
        + (f" {layers[0]} .. {layers[-1]}" if layers else "")
        + f", {len(rank['recomputed'])} recomputed; "
        + (f"from {' and '.join(map(str, depths))} of them, " if depths else "")
        + f"compiled in {rank['compile_s']:.1f} s"
    ]
    in_graph = {part: rank[f"{part}_bytes"] for part in ("parameter", "optimizer", "gradient")}
    by_formula = {part.replace("_", " "): rank[f"{part}_bytes"] for part in ("computing_copy", "activation")}
    graph, formula = (
        "  ".join(f"{part} {size / GB:.3f}" for part, size in sizes.items())
        for sizes in (in_graph, {**by_formula, **rank["auxiliary"]})
    )
    verdict = "" if "fits" not in rank else "  fits" if rank["fits"] else "  DOES NOT FIT"
    lines.append(
        f"  memory, GB: in the graph {graph}; by closed formula {formula}; total {rank['total_bytes'] / GB:.3f}{verdict}"
    )
    if "memory" in rank:
        lines += memory_lines(rank["memory"])
    if rank["host_optimizer_bytes"]:
        lines.append(f"  on the host, GB: optimizer {rank['host_optimizer_bytes'] / GB:.3f}")
    lines.append("  FLOPs a step: " + ", ".join(f"{phase} {flops:.3e}" for phase, flops in rank["flops"].items()))
    lines.append(f"  {'collective':28} {'ranks':>6} {'times':>7} {'bytes each':>14} {'bytes a step':>16}")
    for c in rank["collectives"]:
        size = len(rank["groups"][c["group"]])
        lines.append(
            f"  {c['kind'] + ' ' + c['phase']:28} {size:6} {c['count']:7} {c['bytes_each']:14,} {c['bytes_per_step']:16,}"
        )
    for name, members in rank["groups"].items():
        shown = ", ".join(map(str, members[:10])) + (f", ... {members[-1]}" if len(members) > 10 else "")
        lines.append(f"  group {name}: {counted(len(members), 'rank', 'ranks')} {shown}")
    return lines
