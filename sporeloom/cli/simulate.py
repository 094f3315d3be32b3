# SPDX-License-Identifier: Apache-2.0
"""Simulate a long job whose devices fail: its goodput, when it ends, and what checkpoints, spares and smaller meshes buy.

    sporeloom simulate --devices 16384 --faults llama3_h100 --steps 1000000 --step-time-s 4.5 \\
        --checkpoint-pause-s 10 --restart-s 600 --repair-hours 24 --spares 8

    sporeloom simulate scenario faults.yaml

Failures are equally likely at any time. The step time is that of `plan`, `dry-run --time` or a run of your own. A scenario
has the times of an elastic run on each of its meshes, and faults at given times; its events are printed.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sporeloom.core.command_line import Overwrite, argument, option, output, parse_args
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import print_report
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, number_problems
from sporeloom.simulation.faults import HOUR_S, FaultRates, read_faults
from sporeloom.simulation.intervals import daly, young
from sporeloom.simulation.jitter import slowest_of
from sporeloom.simulation.job import EndlessError, Job, Span, run_job
from sporeloom.simulation.report import Statistics, duration, simulated, table
from sporeloom.simulation.scenario import Event, read_scenario, simulate_scenario
from sporeloom.simulation.trace import trace

INTERVALS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)
"""Intervals that are compared, as multiples of the one in use."""
RUNS_OF_INTERVAL = 30


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Overwrite):
    common: ClassVar[tuple[str, ...]] = (
        *("devices", "faults", "steps", "step_time_s", "checkpoint_every_s", "checkpoint_pause_s", "restart_s"),
        *("repair_hours", "spares", "replica_devices", "slow_server_hours", "runs", "seed"),
    )

    devices: Count = option(..., "number of devices of the job")
    devices_per_server: Count = option(8, "number of devices of a server")
    faults: Path = option(
        ..., "components and their mean time between failures: a YAML file, or a built-in one: llama3_h100"
    )
    steps: Count = option(..., "number of steps of the job")
    step_time_s: Positive = option(..., "time of a step in seconds, without failures and checkpoints")
    checkpoint_every_s: Positive | None = option(
        None, "time of training between checkpoints in seconds (default: Daly's, for the rate of failures)"
    )
    checkpoint_pause_s: Positive = option(..., "time in seconds for which training waits for a checkpoint")
    checkpoint_write_s: NotNegative = option(
        0.0, "time in seconds for which it is then written while training continues (--async-save)"
    )
    memory_copy_every_s: Positive | None = option(
        None, "also try copies in the memory of other servers, after so many seconds of training each (default: none)"
    )
    memory_copy_pause_s: Positive | None = option(
        None, "time in seconds for which training waits for such a copy (default: none)"
    )
    restart_s: NotNegative = option(..., "time in seconds from a failure until training continues")
    repair_hours: NotNegative = option(
        0.0, "time in hours until a failed server is back; 0: as soon as the job restarts"
    )
    slow_server_hours: Positive | None = option(
        None, "time in hours until a slow server is found and replaced, for faults with `slowdown` (default: never)"
    )
    step_jitter: NotNegative = option(
        0.0, "standard deviation of the logarithm of a server's step time; each step waits for the slowest server"
    )
    spares: Natural = option(0, "number of spare servers that replace failed ones")
    replica_devices: Natural = option(
        0, "devices of a data parallel replica: without a spare the job continues with the other replicas; 0: it waits"
    )
    runs: Count = option(500, "number of simulated runs")
    seed: Natural = option(0, "random seed; the same seed gives the same failures")
    trace: Path | None = output(
        None, "write a window of the first run under the last policy as a trace for Perfetto (default: none)"
    )
    trace_from_hours: NotNegative = option(0.0, "beginning of the window, in hours")
    trace_hours: Positive = option(24.0, "length of the window, in hours")
    json: bool = option(False, "print the statistics as JSON")


def check(config: SimulateConfig) -> SimulateConfig:
    """Check the flags.

    Raises:
        ConfigError: all problems of the flags.
    """
    problems = Problems()
    problems += [*number_problems(config), *_problems(config)]
    faults = problems.of(read_faults, config.faults)
    if faults and config.slow_server_hours and all(each.slowdown == 1 for each in faults.components):
        problems.append(
            f"--slow-server-hours {config.slow_server_hours:g} has no effect: no component of {config.faults} has `slowdown`"
        )
    problems.raise_if_any()
    return config


def _problems(config: SimulateConfig) -> Iterator[str]:
    per_server = config.devices_per_server
    if config.devices % per_server:
        yield f"--devices {config.devices} are not servers of {per_server}; give --devices-per-server"
    if config.replica_devices and config.devices % config.replica_devices:
        yield f"--replica-devices {config.replica_devices} does not divide --devices {config.devices}"
    if not config.repair_hours:
        for name in ("spares", "replica_devices"):
            if getattr(config, name):
                flag = "--" + name.replace("_", "-")
                yield f"{flag} has no effect if failed servers are back at once; give --repair-hours"
    if (config.memory_copy_every_s is None) != (config.memory_copy_pause_s is None):
        yield "--memory-copy-every-s and --memory-copy-pause-s belong together; give both"
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    for name in ("trace_from_hours", "trace_hours") if config.trace is None else ():
        if getattr(config, name) != usual[name]:
            yield f"--{name.replace('_', '-')} has no effect without a trace; give --trace"
    if config.checkpoint_every_s and config.checkpoint_write_s > config.checkpoint_every_s:
        yield (
            f"--checkpoint-write-s {config.checkpoint_write_s:g} is longer than --checkpoint-every-s "
            f"{config.checkpoint_every_s:g}: a checkpoint would begin before the last one is written"
        )


@dataclass(frozen=True, kw_only=True)
class ScenarioConfig:
    scenario: Path = argument("YAML file of the run and its faults")
    json: bool = option(False, "print each event as a line of JSON")


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["scenario"]:
        return _scenario(parse_args(ScenarioConfig, __doc__, argv[1:]))
    config = check(parse_args(SimulateConfig, __doc__, argv, check))
    rates = FaultRates.of(read_faults(config.faults), config.devices_per_server)
    num_servers = config.devices // config.devices_per_server
    per_second = sum(rates.per_second(num_servers))
    mtbf = 1 / per_second if per_second else math.inf
    pause = config.checkpoint_pause_s
    interval = config.checkpoint_every_s or max(daly(pause, mtbf), config.checkpoint_write_s)
    job = Job(
        work_s=config.steps * config.step_time_s,
        num_servers=num_servers,
        interval_s=interval,
        pause_s=pause,
        write_s=config.checkpoint_write_s,
        restart_s=config.restart_s,
        repair_s=config.repair_hours * HOUR_S,
        jitter=slowest_of(num_servers, config.step_jitter) if config.step_jitter else 1.0,
        detection_s=config.slow_server_hours * HOUR_S if config.slow_server_hours else math.inf,
    )
    policies_of_job = dict(_policies(job, config))
    name, last = [*policies_of_job.items()][-1]
    policies_of_job |= {f"{name}, copies in memory": each for each in _with_copies(last, config)}
    rows = [(name, simulated(each, rates, config.seed, config.runs)) for name, each in policies_of_job.items()]
    best = _best_interval(last, rates, config.seed)
    if config.trace:
        _write_trace(config, [*policies_of_job.values()][-1], rates)
    if config.json:
        closed = {"mtbf_s": mtbf, "young_s": young(pause, mtbf), "daly_s": daly(pause, mtbf)}
        policies = {name: None if found is None else found.as_json() for name, found in rows}
        print(json_text({**closed, "interval_s": interval, "best_interval_s": best, "policies": policies}, indent=1))
    else:
        print_report("\n".join(_lines(job, mtbf, best, rows)))
    return 0


def _write_trace(config: SimulateConfig, job: Job, rates: FaultRates) -> None:
    """Write the trace of a run, of one that is given up as far as it came.

    Raises:
        ConfigError: the run ends before the window begins.
    """
    spans, begin = list[Span](), config.trace_from_hours * HOUR_S
    with contextlib.suppress(EndlessError):
        run_job(job, rates, config.seed, 0, spans)
    if spans[-1].end_s <= begin:
        raise ConfigError(
            f"--trace-from-hours {config.trace_from_hours:g} is after the end of the run: {spans[-1].end_s / HOUR_S:.1f} h"
        )
    assert config.trace
    values = trace(spans, begin, begin + config.trace_hours * HOUR_S)
    write_text_atomically(config.trace, json_text(values) + "\n")
    print(f"trace in {config.trace}", file=sys.stderr)


def _scenario(config: ScenarioConfig) -> int:
    events = simulate_scenario(read_scenario(config.scenario))
    if config.json:
        print("\n".join(json_text(dataclasses.asdict(event)) for event in events))
    else:
        print_report("\n".join(map(_line_of, events)))
    return 0


def _line_of(event: Event) -> str:
    """An event in words."""
    what = {
        "start": f"start {event.size} processes of {event.devices} devices after step {event.step}",
        "step": f"step {event.step} is done, the first of this start",
        "lost": f"lost rank {' and '.join(map(str, event.ranks))} after step {event.step}; {event.devices} devices are left",
        "resize": f"{event.devices} devices; continue with them after step {event.step + 1}",
        "wait": f"too few devices: {event.devices}; wait",
        "end": f"end after step {event.step}",
    }
    return f"{event.time:9.2f} s  {what[event.event]}"


def _policies(job: Job, config: SimulateConfig) -> Iterator[tuple[str, Job]]:
    if math.isfinite(job.detection_s):
        yield "slow servers stay", dataclasses.replace(job, detection_s=math.inf)
    yield "wait for repairs" if job.repair_s else "restart", job
    if config.spares:
        yield f"{config.spares} spare servers", dataclasses.replace(job, num_spares=config.spares)
    if config.replica_devices:
        per_replica = config.replica_devices / config.devices_per_server
        smaller = dataclasses.replace(job, shrinks=True, servers_per_replica=per_replica)
        yield "fewer replicas", smaller
        if config.spares:
            yield "spares, then fewer replicas", dataclasses.replace(smaller, num_spares=config.spares)


def _with_copies(job: Job, config: SimulateConfig) -> Iterator[Job]:
    """The job with copies in memory between its checkpoints, if they are given.

    Raises:
        ConfigError: a copy would come no more often than a checkpoint.
    """
    every, pause = config.memory_copy_every_s, config.memory_copy_pause_s
    if every is None or pause is None:
        return
    if not every <= job.interval_s / 2 < math.inf:
        raise ConfigError(
            f"--memory-copy-every-s {every:g} is more than half of the {job.interval_s:g} s between checkpoints; give less"
        )
    copies = max(round(job.interval_s / every), math.ceil(job.write_s / every))
    yield dataclasses.replace(job, interval_s=every, pause_s=pause, copies_per_checkpoint=copies)


def _best_interval(job: Job, rates: FaultRates, seed: int) -> float:
    """The interval with the highest goodput, of those that are simulated."""
    intervals = [factor * job.interval_s for factor in INTERVALS if factor * job.interval_s >= job.write_s]

    def goodput(interval: float) -> float:
        found = simulated(dataclasses.replace(job, interval_s=interval), rates, seed, RUNS_OF_INTERVAL)
        return 0.0 if found is None else found.goodput

    return max(intervals, key=goodput)


def _lines(job: Job, mtbf: float, best: float, rows: Sequence[tuple[str, Statistics | None]]) -> Iterator[str]:
    failures = f"a failure every {duration(mtbf)}" if math.isfinite(mtbf) else "no failures"
    saved = f"a checkpoint every {duration(job.interval_s)}" if math.isfinite(job.interval_s) else "no checkpoints"
    yield f"{duration(job.work_s)} of training on {job.num_servers:,} servers, {failures}; {saved}"
    if job.jitter > 1:
        yield f"a step, which waits for the slowest server, takes {job.jitter:.3f} times as long as a server's"
    if math.isfinite(mtbf):
        yield (
            f"best interval: {duration(young(job.pause_s, mtbf))} by Young, {duration(daly(job.pause_s, mtbf))} by Daly, "
            f"{duration(best)} of {len(INTERVALS)} simulated ones"
        )
    yield ""
    yield table(rows)
    if found := next((found for _, found in reversed(rows) if found), None):
        counts = ", ".join(f"{name} {count:.1f}" for name, count in found.interruptions.items())
        yield f"\ninterruptions of a run: {counts or 'none'}"
