# SPDX-License-Identifier: Apache-2.0
"""A simulated step as data and as text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sporeloom.core.html_report import size
from sporeloom.dry_run.time.simulate import COMPUTE, RankTime, critical_path
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.step_time import flops_per_device, step_time


def step_report(
    step: Mapping[int, RankTime], dims: Dimensions, job: Parallelism, cluster: Cluster, adapters: int = 0
) -> dict[str, Any]:
    """The simulated step of the first rank of each stage. Of every stage busy, exposed and idle seconds add up to the step.

    Args:
        adapters: parameters that are trained in place of the model's.
    """
    seconds = max(of.end for of in step.values())
    peak = cluster.peak_tflops * 1e12 * seconds
    return {
        "chip": cluster.chip,
        "seconds": seconds,
        "tokens_per_s": job.global_batch_size * dims.seq_len / seconds,
        "mfu": flops_per_device(dims, job, frozen=bool(adapters))[0] / peak,
        "hfu": sum(of.flops() for of in step.values()) / len(step) / peak,
        "critical_path": _sorted(critical_path(step)),
        "closed_form": vars(step_time(dims, job, cluster, adapters=adapters)),
        "collectives": collectives(step.values()),
        "stages": [_stage(stage, rank, of, seconds) for stage, (rank, of) in enumerate(sorted(step.items()))],
    }


def collectives(ranks: Iterable[RankTime]) -> list[dict[str, Any]]:
    """Calls and sizes of each kind of collective, by its ranks and algorithm."""
    sizes = defaultdict[tuple[str, int, str], list[int]](list)
    for of in ranks:
        for task in of.all_tasks():
            if task.algorithm:
                members = math.prod(len(axis.chosen) for axis in task.group)
                sizes[task.kind, members, task.algorithm].append(task.num_bytes)
    return [
        {"kind": kind, "ranks": members, "algorithm": algorithm, "calls": len(of), "bytes": [min(of), max(of)]}
        for (kind, members, algorithm), of in sorted(sizes.items())
    ]


def _stage(stage: int, rank: int, of: RankTime, seconds: float) -> dict[str, Any]:
    busy, exposed = of.busy(), of.exposed()
    return {
        "stage": stage,
        "rank": rank,
        "busy": _sorted(busy),
        "exposed": _sorted(exposed),
        "communication": _sorted(of.communication()),
        "idle_s": max(0.0, seconds - sum(busy.values()) - sum(exposed.values())),
        "passes": list(_passes(of)),
    }


def _passes(of: RankTime) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of each pass, and of what is computed between two of them."""
    between: tuple[str, float, float] | None = None
    for task, (start, end, _) in zip(of.tasks, of.spans, strict=True):
        if task.inside:
            yield from [between] if between else []
            yield task.name, start, end
            between = None
        elif task.stream == COMPUTE and end > start:
            between = (between[0], between[1], end) if between else (task.name, start, end)
    yield from [between] if between else []


def _sorted(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind, without those that take none, the longest first."""
    return dict(sorted(((kind, part) for kind, part in seconds.items() if part > 0), key=lambda item: -item[1]))


def lines(time: dict[str, Any]) -> list[str]:
    """The simulated step, for a terminal."""
    seconds = time["seconds"]

    def shown(parts: Mapping[str, float]) -> str:
        return "  ".join(f"{kind} {part * 1e3:.2f}" for kind, part in parts.items()) or "nothing"

    found = [
        f"step on {time['chip']}: {seconds * 1e3:,.2f} ms, {time['tokens_per_s']:,.0f} tokens/s, MFU {time['mfu']:.1%}, "
        f"HFU {time['hfu']:.1%}; closed form {sum(time['closed_form'].values()) * 1e3:,.2f} ms",
        f"  critical path, ms: {shown(time['critical_path'])}",
    ]
    algorithms = [
        f"{of['kind']} of {of['ranks']} by {of['algorithm']} ({' to '.join(dict.fromkeys(map(size, of['bytes'])))})"
        for of in time["collectives"]
    ]
    found += [f"  algorithms: {'; '.join(algorithms)}"] if algorithms else []
    for stage in time["stages"]:
        hidden = {k: s - stage["exposed"].get(k, 0.0) for k, s in stage["communication"].items()}
        hidden = {kind: part for kind, part in hidden.items() if part > 1e-3 * seconds}
        found += [
            f"  stage {stage['stage']}, ms: {shown(stage['busy'])}; idle {stage['idle_s'] * 1e3:.2f} "
            f"({stage['idle_s'] / seconds:.1%})",
            f"    exposed communication: {shown(stage['exposed'])}" + (f"; hidden: {shown(hidden)}" if hidden else ""),
        ]
    return found
