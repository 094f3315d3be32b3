# SPDX-License-Identifier: Apache-2.0
"""Discrete-event simulation of ranks whose streams run tasks in order.

A task starts when its stream is free and the tasks that it needs have ended. Tasks of several ranks that meet (a
collective, a message) start together, when the last of them can.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

COMPUTE = "compute"
"""The stream of operators; tasks on all others are communication."""
PASS = "pass"
"""Kind of a task that stands for the tasks of a graph."""


class GroupAxis(NamedTuple):
    """One axis of a communication group."""

    stride: int
    """Distance of ranks that are neighbours along it."""
    degree: int
    """Number of ranks along it."""
    chosen: tuple[int, ...]
    """Indices of those in the group."""


@dataclass(frozen=True, slots=True)
class Task:
    """Work of a rank."""

    name: str
    kind: str
    """matmul, attention, memory or a collective; or PASS."""
    stream: str
    seconds: float
    launch: float = 0.0
    """Seconds of them that launching takes."""
    needs: tuple[int, ...] = ()
    """Earlier tasks of the same rank that must have ended."""
    flops: int = 0
    """FLOPs of matrix products."""
    meets: Hashable = None
    """Key that the tasks of other ranks have, too, which start together with this one."""
    inside: RankTime | None = field(default=None, repr=False)
    """The tasks that a PASS stands for, from its start on, simulated as those of rank 0."""
    num_bytes: int = 0
    """Size of a message, or of the larger of the input and the result of a collective."""
    group: tuple[GroupAxis, ...] = ()
    """The ranks of a collective."""
    pair: tuple[int, int] = (0, 0)
    """Source and target of a message."""
    algorithm: str = ""
    """Algorithm of a collective."""


def _add(found: defaultdict[str, float], more: Mapping[str, float]) -> None:
    for kind, seconds in more.items():
        found[kind] += seconds


class Place(NamedTuple):
    """A task of a rank."""

    rank: int
    number: int


class Span(NamedTuple):
    """Start and end of a task."""

    start: float
    end: float
    after: Place | None
    """The task whose end this one waited for last; None: it starts at once."""


@dataclass(frozen=True)
class RankTime:
    """A rank's tasks and when they run."""

    tasks: Sequence[Task]
    spans: Sequence[Span]

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def busy(self) -> dict[str, float]:
        """Seconds in which the rank computes, by kind."""
        found = defaultdict[str, float](float)
        for task in self.tasks:
            if task.inside:
                _add(found, task.inside.busy())
            elif task.stream == COMPUTE:
                found[task.kind] += task.seconds - task.launch
                found["launch"] += task.launch
        return found

    def exposed(self) -> dict[str, float]:
        """Seconds in which the rank communicates and does not compute, by kind; without waiting for others."""
        found = defaultdict[str, float](float)
        for task in self.tasks:
            if task.inside:
                _add(found, task.inside.exposed())
        others = sorted(
            (span.start, span.end, task.kind)
            for task, span in zip(self.tasks, self.spans, strict=True)
            if task.stream != COMPUTE and span.end > span.start
        )
        first = 0
        for begin, end in self._gaps():
            clock = begin
            while first < len(others) and others[first][1] <= begin:
                first += 1
            for start, stop, kind in itertools.islice(others, first, None):
                if start >= end:
                    break
                if (seconds := min(stop, end) - max(start, clock)) > 0:
                    found[kind] += seconds
                    clock = min(stop, end)
        return found

    def _gaps(self) -> Iterator[tuple[float, float]]:
        """Times in which the rank computes nothing."""
        clock = 0.0
        for task, span in zip(self.tasks, self.spans, strict=True):
            if task.stream == COMPUTE and span.end > span.start:
                if span.start > clock:
                    yield clock, span.start
                clock = span.end
        if self.end > clock:
            yield clock, self.end

    def all_tasks(self) -> Iterator[Task]:
        """The tasks, with those of graphs in place of what stands for them."""
        for task in self.tasks:
            if task.inside:
                yield from task.inside.all_tasks()
            else:
                yield task

    def flops(self) -> int:
        """FLOPs of matrix products."""
        return sum(task.flops for task in self.all_tasks())

    def communication(self) -> dict[str, float]:
        """Seconds of all communication, hidden or not, by kind."""
        found = defaultdict[str, float](float)
        for task in self.tasks:
            if task.inside:
                _add(found, task.inside.communication())
            elif task.stream != COMPUTE:
                found[task.kind] += task.seconds
        return found


def simulate(ranks: Mapping[int, Sequence[Task]]) -> dict[int, RankTime]:
    """Run the tasks of all ranks.

    Raises:
        ValueError: ranks wait for each other for ever.
    """
    return _Simulation(ranks).run()


class _Simulation:
    def __init__(self, ranks: Mapping[int, Sequence[Task]]):
        self.ranks = ranks
        self.spans: dict[Place, Span] = {}
        self.queues: dict[tuple[int, str], list[int]] = defaultdict(list)
        """Tasks of each stream, in order."""
        self.heads: Counter[tuple[int, str]] = Counter()
        self.parties: dict[Hashable, list[Place]] = defaultdict(list)
        self.waiting: dict[Place, list[Place]] = defaultdict(list)
        """Task that has not ended -> those that wait for it."""
        for rank, tasks in ranks.items():
            for number, task in enumerate(tasks):
                self.queues[rank, task.stream].append(number)
                if task.meets is not None:
                    self.parties[task.meets].append(Place(rank, number))

    def run(self) -> dict[int, RankTime]:
        ready = [Place(rank, queue[0]) for (rank, _), queue in self.queues.items()]
        while ready:
            place = ready.pop()
            if place not in self.spans:
                ready += self._try(place)
        if len(self.spans) < sum(map(len, self.ranks.values())):
            stuck = next(
                p for r, ts in self.ranks.items() for p in (Place(r, n) for n in range(len(ts))) if p not in self.spans
            )
            raise ValueError(
                f"ranks wait for each other at {self.ranks[stuck.rank][stuck.number].name} of rank {stuck.rank}"
            )
        return {
            rank: RankTime(tasks, [self.spans[Place(rank, number)] for number in range(len(tasks))])
            for rank, tasks in self.ranks.items()
        }

    def _try(self, place: Place) -> list[Place]:
        """Run a task if it can start, with those that it meets. Returns the tasks that may now be able to."""
        parties = self.parties.get(self._task(place).meets) or [place]
        before: list[Place] = []
        for party in parties:
            if not self._is_its_turn(party):  # it is tried again when it is
                return []
            for needed in self._needed(party):
                if needed not in self.spans:
                    self.waiting[needed].append(place)
                    return []
                before.append(needed)
        last = max(before, key=lambda needed: self.spans[needed].end, default=None)
        start = self.spans[last].end if last else 0.0
        seconds, freed = max(self._task(party).seconds for party in parties), list[Place]()
        for party in parties:
            self.spans[party] = Span(start, start + seconds, last)
            stream = party.rank, self._task(party).stream
            self.heads[stream] += 1
            if self.heads[stream] < len(self.queues[stream]):
                freed.append(Place(party.rank, self.queues[stream][self.heads[stream]]))
            freed += self.waiting.pop(party, [])
        return freed

    def _task(self, place: Place) -> Task:
        return self.ranks[place.rank][place.number]

    def _is_its_turn(self, place: Place) -> bool:
        stream = place.rank, self._task(place).stream
        return self.queues[stream][self.heads[stream]] == place.number

    def _needed(self, place: Place) -> Iterator[Place]:
        """Tasks that must have ended before one starts whose turn it is."""
        task = self._task(place)
        queue, head = self.queues[place.rank, task.stream], self.heads[place.rank, task.stream]
        if head:
            yield Place(place.rank, queue[head - 1])
        yield from (Place(place.rank, number) for number in task.needs)


def critical_path(ranks: Mapping[int, RankTime]) -> dict[str, float]:
    """Seconds of the longest chain of tasks, each of which waits for the one before it, by kind. They add up to the time
    of the step."""
    found = defaultdict[str, float](float)
    place = max(
        (Place(rank, number) for rank, of in ranks.items() for number in range(len(of.spans))),
        key=lambda place: ranks[place.rank].spans[place.number].end,
        default=None,
    )
    while place is not None:
        task, span = ranks[place.rank].tasks[place.number], ranks[place.rank].spans[place.number]
        if task.inside:
            _add(found, critical_path({0: task.inside}))
        else:
            found[task.kind] += span.end - span.start - task.launch
            found["launch"] += task.launch
        place = span.after
    return found
