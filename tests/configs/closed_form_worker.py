# SPDX-License-Identifier: Apache-2.0
"""The closed form of the planner and the graphs of the same job, for tests."""

from pathlib import Path

import numpy as np

from sporeloom.core.command_line import parse_args
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.memory.run import memory_timeline
from sporeloom.dry_run.partitioned import partition_model
from sporeloom.dry_run.time.run import step_times
from sporeloom.planner.activations import KeptActivations
from sporeloom.planner.closed_forms import job_of
from sporeloom.planner.cluster import read_cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.memory import stage_memory
from sporeloom.planner.step_time import step_time


def activation_peak(timeline):
    """Peak bytes of what forward passes keep for backward passes."""
    is_activation = np.array([label.kind == "activation" for label in timeline.labels])[timeline.of_label]
    numbers = np.abs(timeline.events) - 1
    return int(np.cumsum(np.sign(timeline.events) * np.where(is_activation, timeline.sizes, 0)[numbers]).max())


def both(flags):
    """Seconds of a step, and activation bytes of a device of each stage: as simulated, and by closed form.

    Graphs of a pipeline hold their inputs until they run again, so the timeline has one microbatch more.
    """
    run = check(parse_args(DryRunConfig, "", flags, check))
    options = (run.batch_size, run.seq_len), False, run.config.accumulate, run.task
    partitioned = partition_model(run.config.model, run.model, run.strategy, *options)
    mesh, cluster = run.strategy.mesh, read_cluster(Path("ascend910b"))
    simulated = max(of.end for of in step_times(partitioned, cluster).values())
    dims = of_decoder(run.model, run.seq_len)
    job = job_of(run.strategy, run.model, run.batch_size, run.config.accumulate)
    held = [activation_peak(memory_timeline(partitioned, stage * mesh.stage_size)) for stage in range(mesh.pp)]
    planned = [memory.activations for memory in stage_memory(dims, job)]
    planned[job.last_stage] += 2 * KeptActivations.of(dims, job).logits  # temporary in the formulas
    if mesh.pp > 1:
        in_flight = [min(job.num_microbatches, mesh.pp - stage) for stage in range(mesh.pp)]
        planned = [size * (count + 1) / count for size, count in zip(planned, in_flight, strict=True)]
    return {
        "seconds": (simulated, step_time(dims, job, cluster).total),
        "activations": list(zip(held, planned, strict=True)),
    }


def totals(flags):
    """Peak bytes of a device of each stage: live by the timeline, and by closed form."""
    run = check(parse_args(DryRunConfig, "", flags, check))
    options = (run.batch_size, run.seq_len), False, run.config.accumulate, run.task
    partitioned = partition_model(run.config.model, run.model, run.strategy, *options)
    job = job_of(run.strategy, run.model, run.batch_size, run.config.accumulate)
    planned = [memory.total for memory in stage_memory(of_decoder(run.model, run.seq_len), job)]
    stages = [stage * run.strategy.mesh.stage_size for stage in range(run.strategy.mesh.pp)]
    return [(memory_timeline(partitioned, rank).live_bytes, total) for rank, total in zip(stages, planned, strict=True)]
