# SPDX-License-Identifier: Apache-2.0
"""Simulated steps, for tests."""

import dataclasses
from collections import Counter
from pathlib import Path
from unittest.mock import patch

from sporeloom.core.command_line import parse_args
from sporeloom.dry_run.compile import rank_report
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.partitioned import partition_model
from sporeloom.dry_run.summary import summarize
from sporeloom.dry_run.time.device_model import DeviceModel
from sporeloom.dry_run.time.run import step_times
from sporeloom.planner.cluster import read_cluster


def count(of):
    """Number of collectives and messages of each kind in the tasks of a rank."""
    found = Counter()
    for task in of.tasks:
        if task.inside:
            found.update(count(task.inside))
        elif task.kind not in ("matmul", "attention", "memory", "host", "pass"):
            found[task.kind] += 1
    return found


def _partitioned(flags):
    run = check(parse_args(DryRunConfig, "", flags, check))
    options = (run.batch_size, run.seq_len), False, run.config.accumulate, run.task
    return run, partition_model(run.config.model, run.model, run.strategy, *options)


def collectives(flags):
    """Kind, bytes, ranks and seconds of the collectives of a step."""
    found, collective = [], DeviceModel.collective

    def noted(device, kind, num_bytes, ranks):
        choice = collective(device, kind, num_bytes, ranks)
        found.append((kind, num_bytes, list(ranks), choice.seconds))
        return choice

    with patch.object(DeviceModel, "collective", noted):
        run, partitioned = _partitioned(flags)
        step_times(partitioned, run.cluster)
    return found


def step(flags):
    """The report of a step, and what the graphs of each stage count."""
    run, partitioned = _partitioned(flags)
    cluster = read_cluster(Path("ascend910b"))
    times = step_times(partitioned, cluster)
    counted = {}
    reports = [rank_report(partitioned, rank) for rank in times]
    for report in reports:
        kinds = Counter()
        for each in report.collectives:
            kinds[each.kind] += each.count
        done = times[report.rank]
        flops = sum(report.flops.values())
        counted[report.stage] = {"graph": kinds, "tasks": count(done), "flops": flops, "simulated_flops": done.flops()}
    reports[0] = dataclasses.replace(reports[0], step=times)
    return {"time": summarize(run, reports)["time"], "counted": counted}


def tiled(flags):
    """Number of operators that tile what others broadcast, on CPUs and on devices."""
    run, partitioned = _partitioned(flags)
    devices = run.cluster
    cpus = dataclasses.replace(devices, chip="cpu", efficiency=devices.fitted, fused=False)
    found = []
    for cluster in (cpus, dataclasses.replace(devices, fused=False)):
        tasks = [task for one in step_times(partitioned, cluster).values() for task in one.tasks]
        inside = [task for one in tasks for task in (one.inside.tasks if one.inside else [one])]
        found.append(sum(task.name.endswith("Tile") for task in inside))
    return found
