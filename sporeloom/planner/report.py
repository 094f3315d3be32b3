# SPDX-License-Identifier: Apache-2.0
"""Results of the planner as a table, as JSON, and as a strategy file."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from sporeloom.planner.closed_forms import PRECISIONS
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.errors import (
    NoInterval,
    TimeInterval,
    interval_values,
    memory_interval,
    memory_interval_values,
    time_interval,
)
from sporeloom.planner.search import Option, PlanRequest, describe, why_slower
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask, auxiliary_bytes
from sporeloom.strategy.config import OptimizerParallel, Pipeline, Recompute, Strategy
from sporeloom.strategy.text import strategy_text

GB = 2**30
INTERVAL = 14
"""Width of an interval in the table, in characters."""
TOO_MANY_ROWS = 2.0
"""Computed rows per row that experts get, above which the table reports it."""
UNCOUNTED = {"kto": "the forward pass of mismatched texts (--loss-type kto)"}
"""Task -> parts of a step that estimated times leave out."""


def as_dict(option: Option, best: Option, cluster: Cluster, task: TrainedTask = PLAIN_TEXT) -> dict[str, Any]:
    """An option as JSON: seconds, bytes and shares."""
    interval = time_interval(option.dims, option.job, cluster, task)
    return {
        "strategy": {name: value for name, value in dataclasses.asdict(option.job).items() if value is not None},
        "step_time_s": option.seconds,
        **interval_values(interval, option.seconds),
        "tokens_per_s": option.tokens_per_s,
        "mfu": option.mfu,
        "hfu": option.hfu,
        "seconds": {**vars(option.time), "communication": option.time.communication},
        "peak_bytes": option.peak_bytes,
        **memory_interval_values(memory_interval(option.dims, option.job, task), option.peak_bytes),
        "stages": [{**vars(stage), "total": stage.total} for stage in option.memory],
        "why_slower": None if option is best else why_slower(option, best),
    }


def table(request: PlanRequest, options: list[Option]) -> str:
    """Format the options, best first, with the reasons why each is slower."""
    best, dims = options[0], request.dims
    interval = time_interval(dims, best.job, request.cluster, request.task)
    used = f" ({dims.active_parameters / 1e9:.2f} G of them used by a token)" if dims.num_experts else ""
    lines = [
        f"{dims.num_parameters / 1e9:.2f} G parameters{used} on {request.devices} {request.cluster.device_name}, "
        f"{request.global_batch_size} sequences of {dims.seq_len} tokens a step, computed in {request.precision}",
        *_of_task(request, best),
        "",
        f"{'':3} {'step s':>8} {'interval':>{INTERVAL}} {'tokens/s':>11} {'MFU':>6} {'HFU':>6} {'memory':>7} {'bubble':>7} "
        f"{'comm.':>6}  strategy",
    ]
    for number, option in enumerate(options, 1):
        time = option.time
        lines.append(
            f"{number:3} {option.seconds:8.3f} {_bounds(interval, option.seconds)} {option.tokens_per_s:11,.0f} "
            f"{option.mfu:6.1%} {option.hfu:6.1%} "
            f"{option.peak_bytes / GB:5.1f}GB {time.bubble / option.seconds:7.1%} "
            f"{time.communication / option.seconds:6.1%}  {describe(option.job)}"
        )
        if option is not best:
            lines.append(f"{'':12} {option.seconds / best.seconds - 1:+.1%}: {why_slower(option, best)}")
    shares = ", ".join(
        f"{name.replace('_', ' ')} {seconds:.2f} s" for name, seconds in vars(best.time).items() if seconds > 0
    )
    stages = ", ".join(f"{stage.total / GB:.1f}" for stage in best.memory)
    if (computed := best.job.expert_rows(dims)) > TOO_MANY_ROWS:
        lines += [
            "",
            f"experts compute {computed:.1f} rows for each that they get, as each has capacity for all tokens; "
            + ("give the model a capacity_factor" if request.task.has_drops else f"{request.task.name} drops none"),
        ]
    memory = memory_interval(dims, best.job, request.task)
    lines += ["", f"the best one's step: {shares}"]
    lines += [f"memory of its stages, GB: {stages}; the fullest: {memory.describe(best.peak_bytes)}"]
    lines += [f"memory: {memory.explain()}"]
    return "\n".join([*lines, f"interval: {interval.explain()}"])


def _bounds(interval: TimeInterval | NoInterval, seconds: float) -> str:
    if isinstance(interval, NoInterval):
        return f"{'-':>{INTERVAL}}"
    return f"{'{:.3g} to {:.3g}'.format(*interval.of(seconds)):>{INTERVAL}}"


def _of_task(request: PlanRequest, best: Option) -> list[str]:
    """Describe auxiliary models and the task, where there are any."""
    if not (told := request.task.describe()):
        return []
    stages = auxiliary_bytes(request.dims, best.job, request.task)
    beside = {what: max(stage[what] for stage in stages) for what in stages[0]}
    sizes = ", ".join(f"{what} {size / GB:.1f}" for what, size in beside.items())
    uncounted = "the sampling of texts" if request.task.samples else UNCOUNTED.get(request.task.name)
    times = f"; times are of an update, without {uncounted}" if uncounted else ""
    return [f"{told}{times}" + (f"; GB of the best one's devices: {sizes}" if sizes else "")]


def command_of(request: PlanRequest, option: Option, about: Sequence[str] = ()) -> list[str]:
    """The command that runs an option, without the strategy and the data. `about`: flags that give the model."""
    job = option.job
    words = [request.task.name.replace("pretraining", "train"), *about]
    words += ["--batch-size", str(job.global_batch_size // request.task.rows_per_unit)]
    words += ["--seq-len", str(request.dims.seq_len)]
    words += ["--compute-dtype", next(name for name, short in PRECISIONS.items() if short == job.precision)]
    if not job.flash_attention and job.precision != "fp32":
        words += ["--attention", "plain"]
    if job.pp == 1 and job.num_microbatches > 1:
        words += ["--accumulate", str(job.num_microbatches)]
    return words


def strategy_file(
    request: PlanRequest, option: Option, rules: str, about: Sequence[str] = (), path: Path = Path("FILE")
) -> str:
    """Format the option as a strategy file, headed by the command that runs it.

    Args:
        about: flags that give the model.
        path: of this file, for the command.
    """
    job, dims = option.job, request.dims
    interval, memory = time_interval(dims, job, request.cluster, request.task), memory_interval(dims, job, request.task)
    words, named = command_of(request, option, about), shlex.join(["--strategy", str(path)])
    each = request.cluster.devices_per_node
    if request.devices > each:
        command = f"launch-script {named} --devices-per-server {each} -- {shlex.join(words)}"
    else:
        command = f"{words[0]} {named} {shlex.join(words[1:])}"
    head = [
        f"# Planned for {request.devices} {request.cluster.device_name}: step {option.seconds:.3f} s "
        f"({interval.describe(option.seconds)}), "
        f"{option.tokens_per_s:,.0f} tokens/s, "
        f"MFU {option.mfu:.1%}, {option.peak_bytes / GB:.1f} GB of {request.cluster.memory_gb:g} "
        f"({memory.describe(option.peak_bytes)}).",
        f"# sporeloom {command}",
    ]
    recompute = None
    if job.recompute != "none":
        kind: Literal["full", "selective"] = "selective" if job.recompute == "selective" else "full"
        layers = None if job.recomputed_layers is None else list(job.recomputed_layers)
        recompute = Recompute(kind=kind, per_stage=layers)
    strategy = Strategy(
        mesh=job.mesh,
        pipeline=Pipeline(num_microbatches=job.num_microbatches, virtual_stages=job.virtual_stages)
        if job.pp > 1
        else Pipeline(),
        recompute=recompute,
        optimizer_parallel=OptimizerParallel(
            shard_size=job.shards if job.shards < job.replicas else None,
            shard_accumulated_gradients=job.shards_accumulated_gradients,
            reshard_after_forward=job.zero == 3,
        )
        if job.zero
        else None,
        sequence_parallel=job.sequence_parallel,
    )
    return strategy_text(strategy, rules, head)


def _fits_report(fits: dict[str, Any]) -> list[str]:
    def line(name: str, counts: dict[str, Any]) -> str:
        return (
            f"{name:40} {counts['right']:5} of {counts['rows']} right; said it fits, wrongly: {counts['fits_wrong']} of "
            f"{counts['fits_wrong'] + counts['does_not_fit_right']}; said it does not, wrongly: "
            f"{counts['does_not_fit_wrong']} of {counts['does_not_fit_wrong'] + counts['fits_right']}"
        )

    lines = [line("fits or not, of runs that ran or failed", fits)]
    lines.append(line("  all that decides memory is published", fits["all_published"]))
    lines.append(line("  some of it is assumed", fits["partly_assumed"]))
    lines.append(f"  not judged, as nothing says whether they ran: {fits['not_judged']}, and those not predicted")
    return lines


def _open_settings(found: dict[str, Any]) -> str:
    if not found["rows"]:
        return "settings that sources leave open: none"
    return (
        f"settings that sources leave open: {found['inside']} of {found['rows']} runs that leave some were measured between "
        f"the fastest and the slowest plausible ones, which are a factor of {found['median_ratio']:.2f} apart (median)"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def validation_report(report: dict[str, Any]) -> str:
    """Format the errors as a table."""
    time, memory, fits = report["step_time"], report["memory"], report["fits"]
    lines = [f"{'step time':40} {'rows':>5} {'median':>8} {'90th':>8} {'bias':>8}"]

    def line(name: str, figures: dict[str, Any]) -> str:
        return (
            f"{name[:40]:40} {figures['rows']:5} {_percent(figures['median_abs_error']):>8} "
            f"{_percent(figures['p90_abs_error']):>8} {_percent(figures['median_error']):>8}"
        )

    lines += [line("all", time)]
    for kind in ("by_chip", "by_source"):
        lines += ["", *(line("  " + name, figures) for name, figures in time[kind].items())]
    lines += ["", _open_settings(time["open_settings"])]
    lines += ["", line("memory, where measured", memory)]
    lines += _fits_report(fits)
    lines += ["", "not predicted:", *(f"  {count:4}  {reason}" for reason, count in report["not_predicted"].items())]
    return "\n".join(lines)
