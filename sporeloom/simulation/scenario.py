# SPDX-License-Identifier: Apache-2.0
"""Simulates an elastic run through given faults: ranks that are killed, slow ranks and links, devices that come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive
from sporeloom.core.reader import fields_from, read_yaml

MAX_EVENTS = 100_000


@dataclass(frozen=True, kw_only=True)
class MeshTimes:
    """The times of a run on one of its meshes."""

    devices: Count
    """Ranks of the mesh."""
    step_s: Positive
    """Time of a step without faults, with the state that is kept after it."""
    start_s: NotNegative
    """Time from a start until its first step begins."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens at a given time: one of `kill`, `devices`, `slow_rank` and `slow_link`."""

    at_s: NotNegative
    """Time since the first step began."""
    kill: Natural | None = None
    """Rank that is killed."""
    devices: Natural | None = None
    """Number of devices that the run can use from now on."""
    slow_rank: Natural | None = None
    """Rank whose steps take `delay_s` longer."""
    slow_link: list[Natural] | None = None
    """Two ranks: each message from the first to the second takes `delay_s` longer."""
    delay_s: Positive | None = None
    until_s: Positive | None = None
    """Time at which a rank or link is no longer slow."""
    messages: Count | None = None
    """Messages of a step over the slow link, one after another."""

    def __post_init__(self) -> None:
        kinds = [self.kill, self.devices, self.slow_rank, self.slow_link]
        if sum(kind is not None for kind in kinds) != 1:
            raise ConfigError(f"faults: at {self.at_s:g} s: give one of kill, devices, slow_rank and slow_link")
        is_slow = self.slow_rank is not None or self.slow_link is not None
        if [is_slow] * 2 != [self.delay_s is not None, self.until_s is not None]:
            raise ConfigError(f"faults: at {self.at_s:g} s: delay_s and until_s belong to slow_rank and slow_link")
        if (self.slow_link is not None) != (self.messages is not None):
            raise ConfigError(f"faults: at {self.at_s:g} s: give `messages` with slow_link, and only there")
        if self.slow_link is not None and len(set(self.slow_link)) != 2:
            raise ConfigError(f"faults: at {self.at_s:g} s: slow_link takes two ranks")
        if self.until_s is not None and self.until_s <= self.at_s:
            raise ConfigError(f"faults: at {self.at_s:g} s: until_s {self.until_s:g} must be later")

    @property
    def ranks(self) -> list[int]:
        """The ranks that it names."""
        return [rank for rank in (self.kill, self.slow_rank, *(self.slow_link or ())) if rank is not None]

    def delay(self, time_s: float, size: int) -> float:
        """Seconds by which a step of so many ranks that begins now is longer."""
        if not self.delay_s or not self.until_s or not self.at_s <= time_s < self.until_s or max(self.ranks) >= size:
            return 0.0
        return self.delay_s * (self.messages or 1)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """An elastic run and its faults."""

    steps: Count
    """Steps of the run."""
    meshes: list[MeshTimes]
    """The meshes that it can use; always the largest that there are devices for."""
    detect_s: NotNegative
    """Time from a kill until all other processes have ended."""
    look_s: NotNegative = 0.0
    """Time until another number of devices is noticed."""
    stop_s: NotNegative = 0.0
    """Time from the end of a step until all processes, which were asked to stop, have saved and ended."""
    end_s: NotNegative = 0.0
    """Time from the last step to the end of the run."""
    save_every: Count = 1
    """Steps between the states that a loss leads back to."""
    max_restarts: Natural = 3
    """Number of losses that the run survives; the next one ends it."""
    faults: list[Fault]

    def __post_init__(self) -> None:
        sizes = [mesh.devices for mesh in self.meshes]
        if not sizes or len(set(sizes)) < len(sizes):
            raise ConfigError("meshes: name at least one, and each number of devices once")
        if wrong := [fault for fault in self.faults if max(fault.ranks, default=0) >= max(sizes)]:
            raise ConfigError(
                f"faults: at {fault.at_s:g} s: there is no rank {max(fault.ranks)}; the largest mesh has {max(sizes)}"
                for fault in wrong
            )

    def mesh_for(self, devices: int) -> MeshTimes | None:
        """The largest mesh of at most so many devices."""
        return max((m for m in self.meshes if m.devices <= devices), key=lambda mesh: mesh.devices, default=None)


@dataclass(frozen=True)
class Event:
    """An event of a run. Times in seconds since the first step began."""

    time: float
    event: str
    """`start`, `step` (the first of a start is done), `lost`, `resize`, `wait`, or `end`."""
    devices: int
    """Number of devices that can be used."""
    size: int
    """Number of processes."""
    step: int
    """The last step that is done; of a start, the step of its state."""
    ranks: tuple[int, ...] = ()
    """Lost ranks."""


def read_scenario(path: Path) -> Scenario:
    """Load a scenario.

    Raises:
        ConfigError: unreadable, or a key that is unknown, missing or wrong.
    """
    return fields_from(Scenario, read_yaml(path))


def simulate_scenario(scenario: Scenario) -> list[Event]:
    """The events of the run, in their order. A run that waits for devices that do not come ends with `wait`.

    Raises:
        ConfigError: there are too many of them.
    """
    events = []
    for event in _Run(scenario).events():
        events.append(event)
        if len(events) > MAX_EVENTS:
            raise ConfigError(f"the run has more than {MAX_EVENTS:,} events")
    return events


@dataclass
class _Run:
    """Clock and progress of a run."""

    scenario: Scenario
    time: float = 0.0
    step: int = 0
    saved: int = 0
    devices: int = 0
    size: int = 0
    is_resizing: bool = False
    losses: int = 0
    found: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.devices = max(mesh.devices for mesh in self.scenario.meshes)
        sudden = [fault for fault in self.scenario.faults if fault.kill is not None or fault.devices is not None]
        noticed = [(fault, fault.at_s + (0.0 if fault.devices is None else self.scenario.look_s)) for fault in sudden]
        self.pending = sorted(noticed, key=lambda each: each[1])

    def events(self) -> Iterator[Event]:
        is_first = True
        while True:
            mesh = self.scenario.mesh_for(self.devices)
            if mesh is None:
                yield self.event("wait")
                if not self.wait():
                    return
                continue
            self.size, self.is_resizing, self.step = mesh.devices, False, self.saved
            yield self.event("start")
            is_done = self.advance(0.0 if is_first else mesh.start_s, is_stopped_at_once=True) and self.train(mesh)
            is_first = False
            yield from self.found
            self.found.clear()
            if is_done or self.losses > self.scenario.max_restarts:
                yield self.event("end")
                return

    def train(self, mesh: MeshTimes) -> bool:
        """Train until the end of this start. Returns whether it is the end of the run."""
        scenario, is_first = self.scenario, True
        while self.step < scenario.steps:
            delay = sum(fault.delay(self.time, self.size) for fault in scenario.faults)
            if not self.advance(mesh.step_s + delay):
                return False
            self.step += 1
            if self.step % scenario.save_every == 0 or self.is_resizing:
                self.saved = self.step
            if is_first:
                self.note("step")
                is_first = False
            if self.is_resizing and self.step < scenario.steps:  # after the last step the run just ends
                self.advance(scenario.stop_s)
                return False
        return self.advance(scenario.end_s)

    def advance(self, seconds: float, is_stopped_at_once: bool = False) -> bool:
        """Let time pass. Returns False if the processes have ended before."""
        end = self.time + seconds
        while self.pending and self.pending[0][1] <= end:
            fault, time = self.pending.pop(0)
            self.time = max(self.time, time)
            if fault.kill is not None:
                if fault.kill < self.size:
                    self.lose(fault.kill)
                    return False
                continue
            assert fault.devices is not None
            self.devices, wanted = fault.devices, self.scenario.mesh_for(fault.devices)
            if self.is_resizing or (wanted and wanted.devices == self.size):
                continue
            self.is_resizing = True
            self.note("resize")
            if is_stopped_at_once:
                return False
        self.time = end
        return True

    def lose(self, rank: int) -> None:
        """Let the processes end after a kill; others may be killed meanwhile."""
        lost, given, end = [rank], None, self.time + self.scenario.detect_s
        while self.pending and self.pending[0][1] <= end:
            fault, _ = self.pending.pop(0)
            if fault.kill is not None and fault.kill < self.size and fault.kill not in lost:
                lost.append(fault.kill)
            given = fault.devices if fault.devices is not None else given
        if given is None:  # a smaller number that is being changed to has counted them already
            given = self.devices - (0 if self.is_resizing and self.devices < self.size else len(lost))
        self.time, self.devices, self.losses = end, given, self.losses + 1
        self.found.append(Event(end, "lost", self.devices, self.size, self.step, tuple(lost)))

    def wait(self) -> bool:
        """Wait for devices. Returns False if none come."""
        while self.pending:
            fault, time = self.pending.pop(0)
            self.time = max(self.time, time)
            if fault.devices is not None:
                self.devices = fault.devices
                return True
        return False

    def note(self, event: str) -> None:
        self.found.append(self.event(event))

    def event(self, event: str) -> Event:
        return Event(self.time, event, self.devices, self.size, self.step)
