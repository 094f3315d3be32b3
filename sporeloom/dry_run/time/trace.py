# SPDX-License-Identifier: Apache-2.0
"""A simulated step as a trace for Perfetto and chrome://tracing: a process a rank, a thread a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sporeloom.dry_run.time.simulate import COMPUTE, RankTime, Task

MICROSECOND = 1e-6
GRAPHS = "graphs"
"""Thread that shows which graph runs."""


def trace(step: Mapping[int, RankTime]) -> dict[str, Any]:
    """Every task of a step as an event.

    Args:
        step: rank -> its tasks.
    """
    events: list[dict[str, Any]] = []
    for stage, (rank, of) in enumerate(sorted(step.items())):
        threads: dict[str, int] = {GRAPHS: 0, COMPUTE: 1}
        made = [
            {
                "ph": "X",
                "pid": rank,
                "tid": threads.setdefault(stream, len(threads)),
                "name": task.name,
                "cat": task.kind,
                "ts": round(start / MICROSECOND, 3),
                "dur": round((end - start) / MICROSECOND, 3),
                **_about_collective(task),
            }
            for stream, task, start, end in _events(of, 0.0)
        ]
        events.append(_about(rank, 0, "process_name", f"stage {stage}, rank {rank}"))
        events += [_about(rank, thread, "thread_name", stream) for stream, thread in threads.items()]
        events += made
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(of: RankTime, offset: float) -> Iterator[tuple[str, Task, float, float]]:
    """Stream, task, start and end of every task that takes time."""
    for task, (start, end, _) in zip(of.tasks, of.spans, strict=True):
        if end > start:
            yield GRAPHS if task.inside else task.stream, task, offset + start, offset + end
        if task.inside:
            yield from _events(task.inside, offset + start)


def _about_collective(task: Task) -> dict[str, Any]:
    return {"args": {"algorithm": task.algorithm, "bytes": task.num_bytes}} if task.algorithm else {}


def _about(rank: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}}
