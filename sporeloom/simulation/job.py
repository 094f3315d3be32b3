# SPDX-License-Identifier: Apache-2.0
"""Simulates one run of a job whose servers fail, from its first step to its last."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sporeloom.simulation.faults import FaultRates

MAX_TIME = 20
"""Time of a run after which it is given up, as a multiple of its work."""


class EndlessError(Exception):
    """A run that makes hardly any progress."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job and its policy for failures. Times in seconds."""

    work_s: float
    """Time of training without failures and checkpoints, on all servers."""
    num_servers: int
    interval_s: float
    """Training between two checkpoints."""
    pause_s: float
    """Time for which training waits for a checkpoint."""
    write_s: float = 0.0
    """Time for which the checkpoint is written after that, while training continues; only then it can be restored."""
    copies_per_checkpoint: int = 1
    """Number of checkpoints for each that is written. The others are in the memory of other servers, and lost if a failure
    takes several servers at once."""
    restart_s: float = 0.0
    """Time from a failure until training continues: detection, start, compilation, loading."""
    repair_s: float = 0.0
    """Time until a failed server is back."""
    num_spares: int = 0
    """Servers that replace failed ones."""
    shrinks: bool = False
    """Whether it continues without the data parallel replicas that miss a server, with the same global batch; otherwise it
    waits for a repair."""
    servers_per_replica: float = 1.0
    """Servers of a replica; below 1 where several share one."""
    jitter: float = 1.0
    """Mean time of a step, which waits for the slowest server, divided by that of a server."""
    detection_s: float = math.inf
    """Time until a slow server is found; it is replaced after a checkpoint."""

    def speed(self, num_missing: int) -> float:
        """Speed without some servers, as a fraction; 0: no replica is complete."""
        replicas = self.num_servers / self.servers_per_replica
        lost = math.ceil(num_missing / self.servers_per_replica)
        return max(0.0, (replicas - lost) / replicas)


@dataclass
class Outcome:
    """Seconds of a run: its work, and these; and its interruptions by component, also replacements of slow servers."""

    finish_s: float = 0.0
    lost_s: float = 0.0
    """Training that was repeated, because no checkpoint had it."""
    paused_s: float = 0.0
    down_s: float = 0.0
    """Restarts, and waiting for repairs."""
    slowed_s: float = 0.0
    """Time that missing replicas cost."""
    straggled_s: float = 0.0
    """Time that steps waited for the slowest server."""
    interruptions: Counter[str] = field(default_factory=Counter)


class Span(NamedTuple):
    """Something that a run does for a while."""

    row: str
    """training, checkpoints, down or repairs."""
    name: str
    start_s: float
    end_s: float


class Draw:
    """Random failures: waiting times and components."""

    def __init__(self, rates: FaultRates, seed: int, run: int):
        self.rates, self.random = rates, np.random.default_rng([seed, run])

    def next_failure(self, num_servers: int, slow: bool = False) -> tuple[float, int]:
        """Seconds until one, or with `slow` until a component becomes slow; and the index of the component."""
        each = self.rates.per_second(num_servers, slow)
        total = sum(each)
        if not total:
            return math.inf, 0
        seconds = self.random.exponential(1 / total)
        return seconds, int(self.random.choice(len(each), p=[rate / total for rate in each]))


def run_job(job: Job, rates: FaultRates, seed: int, run: int, spans: list[Span] | None = None) -> Outcome:
    """Simulate one run.

    Args:
        spans: to which all that it does is added, if given.

    Raises:
        EndlessError: it takes MAX_TIME times as long as without failures.
    """
    return _Run(job, Draw(rates, seed, run), spans).finish()


class _Run:
    """Clock, progress and servers of a run."""

    def __init__(self, job: Job, draw: Draw, spans: list[Span] | None = None):
        self.job, self.draw, self.outcome, self.spans = job, draw, Outcome(), spans
        self.clock = self.work = self.saved = 0.0
        self.pending: tuple[float, float] | None = None  # when the newest checkpoint can be restored, and its work
        self.copied, self.copies = 0.0, 0  # work of the newest copy in memory, and copies since the last checkpoint
        self.since = 0.0  # training since the last checkpoint
        self.pause_left = 0.0
        self.spares = job.num_spares
        self.repairs: list[float] = []  # when servers are back
        self.missing = 0
        self.failure, self.component = 0.0, 0
        self.slow: list[tuple[float, int]] = []  # when a slow server is found, and its component
        self.num_slow = Counter[int]()  # by component
        self.onset, self.slow_component = math.inf, 0  # of the next one
        self.draw_failure()
        self.draw_onset()

    def finish(self) -> Outcome:
        while self.work < self.job.work_s:
            if self.clock > MAX_TIME * self.job.work_s:
                raise EndlessError
            grown = self.repairs[0] if self.missing and self.repairs else math.inf
            found = self.slow[0][0] if self.slow else math.inf
            if self.train(min(self.failure, self.onset, found, grown)):
                break
            if self.clock >= self.failure:
                self.fail()
            elif self.clock >= self.onset:
                heapq.heappush(self.slow, (self.clock + self.job.detection_s, self.slow_component))
                self.num_slow[self.slow_component] += 1
                self.draw_onset()
            elif self.clock >= found:
                self.replace_slow()
            else:
                self.grow()
        self.outcome.finish_s = self.clock
        return self.outcome

    def draw_failure(self) -> None:
        seconds, self.component = self.draw.next_failure(self.job.num_servers - self.missing)
        self.failure = self.clock + seconds

    def draw_onset(self) -> None:
        if self.draw.rates.has_slow:
            seconds, self.slow_component = self.draw.next_failure(self.job.num_servers - self.missing, slow=True)
            self.onset = self.clock + seconds

    def speed(self) -> float:
        """Speed of training, with missing and slow servers."""
        slowdown = max((self.draw.rates.slowdowns[each] for each, count in self.num_slow.items() if count), default=1.0)
        return self.job.speed(self.missing) / (slowdown * self.job.jitter)

    # Training

    def train(self, until: float) -> bool:
        """Train and save until a time. Returns whether all work is done."""
        job, speed = self.job, self.speed()
        while self.clock < until:
            if self.pause_left:
                self.pause(until)
                continue
            cycle = job.interval_s + job.pause_s
            left = (job.work_s - self.work) / speed
            cycles = (min(until, self.clock + 2 * left) - self.clock) // cycle
            count = int(min(cycles, left // job.interval_s)) if not self.since and self.spans is None else 0
            if count:
                self.skip(count, speed)
                continue
            seconds = min(until - self.clock, job.interval_s - self.since, left)
            self.progress(seconds, speed)
            self.since += seconds
            if seconds == left:
                self.work = job.work_s
                return True
            if self.since >= job.interval_s:
                self.since, self.pause_left = 0.0, job.pause_s
                if not job.pause_s:
                    self.saved_now(self.clock)
        self.clock = max(self.clock, until)
        return False

    def note(self, row: str, name: str, start_s: float, end_s: float) -> None:
        if self.spans is not None and end_s > start_s:
            self.spans.append(Span(row, name, start_s, end_s))

    def progress(self, seconds: float, speed: float) -> None:
        self.note("training", f"training at {speed:.1%}", self.clock, self.clock + seconds)
        self.clock += seconds
        self.work += seconds * speed
        complete = self.job.speed(self.missing)
        self.outcome.slowed_s += seconds * (1 - complete)
        self.outcome.straggled_s += seconds * (complete - speed)

    def pause(self, until: float) -> None:
        seconds = min(self.pause_left, until - self.clock)
        self.note("checkpoints", "checkpoint", self.clock, self.clock + seconds)
        self.clock += seconds
        self.pause_left -= seconds
        self.outcome.paused_s += seconds
        if not self.pause_left:
            self.saved_now(self.clock)

    def skip(self, count: int, speed: float) -> None:
        """Several intervals with their checkpoints at once."""
        job = self.job
        self.progress(count * job.interval_s, speed)
        self.clock += count * job.pause_s
        self.outcome.paused_s += count * job.pause_s
        written, self.copies = divmod(self.copies + count, job.copies_per_checkpoint)
        work = self.work - self.copies * job.interval_s * speed  # of the last one that is written
        if written > 1:
            self.saved, self.pending = work - job.copies_per_checkpoint * job.interval_s * speed, None
        if written:
            self.write(self.clock - self.copies * (job.interval_s + job.pause_s), work)
        self.copied = self.work

    def saved_now(self, time: float) -> None:
        """A checkpoint is taken, in memory or to be written."""
        self.copied, self.copies = self.work, self.copies + 1
        if self.copies == self.job.copies_per_checkpoint:
            self.copies = 0
            self.write(time, self.work)

    def write(self, time: float, work: float) -> None:
        """Begin to write a checkpoint. The one before is written by now, because intervals are longer than writing takes."""
        if self.pending:
            self.saved = self.pending[1]
        self.pending = (time + self.job.write_s, work)

    # Failures

    def fail(self) -> None:
        self.restore()
        self.restart(self.lose_server(self.component), self.draw.rates.names[self.component])

    def restart(self, until: float, name: str = "restart") -> None:
        """Wait until training can continue, and for each restart that fails as well."""
        left = self.down(until, name)
        while left > 0:
            self.restore()  # what several servers had in memory is lost now, too
            left = self.down(self.lose_server(self.component), self.draw.rates.names[self.component])

    def restore(self) -> None:
        if self.pending and self.pending[0] <= self.clock:
            self.saved = self.pending[1]
        if self.job.copies_per_checkpoint > 1 and self.draw.rates.num_taken[self.component] < 2:
            found = self.copied
        else:
            found, self.copies = self.saved, 0
        self.outcome.lost_s += self.work - found
        self.work = self.copied = found
        self.pending, self.since, self.pause_left = None, 0.0, 0.0

    def lose_server(self, component: int) -> float:
        """Note a failure and take its servers out. Returns the time at which training can continue."""
        job, rates = self.job, self.draw.rates
        self.outcome.interruptions[rates.names[component]] += 1
        self.return_repaired()
        taken = min(rates.num_taken[component], job.num_servers - self.missing)
        for _ in range(taken if job.repair_s else 0):
            heapq.heappush(self.repairs, self.clock + job.repair_s)
            self.note("repairs", rates.names[component], self.clock, self.clock + job.repair_s)
            if self.spares:
                self.spares -= 1
            else:
                self.missing += 1
        start = self.clock
        while self.missing and not (job.shrinks and job.speed(self.missing)):
            start = max(start, heapq.heappop(self.repairs))
            self.missing -= 1
        return start + job.restart_s

    def return_repaired(self) -> None:
        while self.repairs and self.repairs[0] <= self.clock:
            heapq.heappop(self.repairs)
            if self.missing:
                self.missing -= 1
            else:
                self.spares += 1

    def down(self, until: float, name: str = "restart") -> float:
        """Wait until training can continue. Returns the seconds that are left of that at the next failure, or 0."""
        self.draw_failure()
        end = min(until, self.failure)
        self.outcome.down_s += end - self.clock
        self.note("down", name, self.clock, end)
        self.clock = end
        return until - end

    def grow(self) -> None:
        """Take back repaired servers: save, then restart with them."""
        self.clock = max(self.clock, self.repairs[0])
        if self.save():
            self.return_repaired()
            self.restart(self.clock + self.job.restart_s)

    def replace_slow(self) -> None:
        """Save, then restart without a slow server that was found."""
        if self.save():
            _, component = heapq.heappop(self.slow)
            self.num_slow[component] -= 1
            self.restart(self.lose_server(component))

    def save(self) -> bool:
        """Take a checkpoint and wait until it is written. Returns False if a failure prevents it."""
        for seconds in (self.pause_left, self.job.pause_s + self.job.write_s):
            end = min(self.clock + seconds, self.failure)
            self.outcome.paused_s += end - self.clock
            self.note("checkpoints", "checkpoint", self.clock, end)
            self.clock = end
            if self.clock >= self.failure:
                self.fail()
                return False
        self.saved, self.pending, self.since, self.pause_left = self.work, None, 0.0, 0.0
        self.copied, self.copies = self.work, 0
        return True


def runs(job: Job, rates: FaultRates, seed: int, number: int) -> Iterator[Outcome]:
    """Simulate a number of runs; the same seed gives the same failures."""
    return (run_job(job, rates, seed, run) for run in range(number))
