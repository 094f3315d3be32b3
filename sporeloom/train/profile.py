# SPDX-License-Identifier: Apache-2.0
"""Profiles of some steps: one Chrome trace of all CPU processes, or MindSpore's profiler on devices."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspore import profiler

from sporeloom.core.files import remove_folder, write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import milestone
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.trace import TRACE, Span, now

FILE, PARTS, DEVICE_FOLDER = "profile.json", ".profile_parts", "profile"
SEGMENT = "segment"
THREADS = {"loop": 1, "graph": 2, SEGMENT: 3, "communication": 4, "wait": 5}
"""Kinds of spans in the order in which a viewer shows them."""
MICROSECONDS = 1e6


class Profile:
    """Records the steps of `--profile`. All ranks make the same calls.

    On CPU processes the spans of all ranks go to profile.json of the output folder; on devices MindSpore's profiler writes to
    a folder for each rank.
    """

    def __init__(self, engine: Engine, folder: Path, steps: range):
        self.engine, self.folder, self.steps = engine, folder, steps
        self._begin = 0.0
        self._of_device: Any = None

    def begin_step(self, step: int) -> None:
        """Start before the first of the steps, or in their middle, where a run is resumed."""
        if step in self.steps and not self._is_on:
            if self.engine.target != "CPU":
                folder = self.folder / DEVICE_FOLDER / f"rank-{self.engine.rank}"
                handler = profiler.tensorboard_trace_handler(str(folder))
                self._of_device = profiler.profile(start_profile=False, on_trace_ready=handler)
                self._of_device.start()
            TRACE.begin()
        self._begin = now()

    def end_step(self, step: int) -> None:
        """Write the profile after the last of the steps."""
        TRACE.add("loop", f"step {step}", self._begin)
        if step >= self.steps[-1]:
            self.finish()

    def finish(self) -> None:
        """Write what is recorded, if anything is: the run may end before the last of the steps."""
        if self._is_on:
            self._write(TRACE.end())

    @property
    def _is_on(self) -> bool:
        return TRACE.is_on

    def _write(self, spans: Sequence[Span]) -> None:
        if self._of_device is not None:
            self._of_device.stop()
            self._say(f"profile by MindSpore in {self.folder / DEVICE_FOLDER}")
            return
        parts = self.folder / PARTS
        parts.mkdir(parents=True, exist_ok=True)
        write_text_atomically(parts / f"{self.engine.rank}.json", json_text(spans))
        self.engine.barrier()
        if self.engine.is_log_rank:
            found = {int(path.stem): [Span(*each) for each in json.loads(path.read_text())] for path in parts.iterdir()}
            write_text_atomically(self.folder / FILE, json_text(chrome_trace(dict(sorted(found.items())))) + "\n")
            remove_folder(parts)
            self._say(f"profile in {self.folder / FILE}, for ui.perfetto.dev; {describe(found.values())}")
        self.engine.barrier()

    def _say(self, text: str) -> None:
        if self.engine.is_log_rank:
            milestone(text)


def chrome_trace(ranks: Mapping[int, Sequence[Span]]) -> dict[str, Any]:
    """The spans of ranks in Chrome's trace format: a process for each rank, a thread for each kind. The time between two
    collectives of a graph is a segment of it."""
    start = min((span.begin for spans in ranks.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in ranks.items():
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for kind, thread in THREADS.items():
            about = {"ph": "M", "pid": rank, "tid": thread}
            events.append({**about, "name": "thread_name", "args": {"name": kind}})
            events.append({**about, "name": "thread_sort_index", "args": {"sort_index": thread}})
        every = [(span.kind, span) for span in spans] + [(SEGMENT, span) for span in segments(spans)]
        for kind, span in sorted(every, key=lambda one: one[1].begin):
            at, length = span.begin - start, span.end - span.begin
            times = {"ts": round(at * MICROSECONDS, 3), "dur": round(length * MICROSECONDS, 3)}
            events.append({"ph": "X", "name": span.name, "cat": kind, "pid": rank, "tid": THREADS[kind], **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def segments(spans: Sequence[Span]) -> Iterator[Span]:
    """The parts of a rank's graphs between their collectives."""
    messages = sorted((span for span in spans if span.kind == "communication"), key=lambda span: span.begin)
    for graph in spans:
        if graph.kind != "graph":
            continue
        begin, after = graph.begin, "the beginning"
        for message in messages:
            if graph.begin <= message.begin and message.end <= graph.end:
                yield Span("graph", f"{graph.name}, after {after}", begin, message.begin)
                begin, after = message.end, message.name
        yield Span("graph", f"{graph.name}, after {after}", begin, graph.end)


def describe(ranks: Iterable[Sequence[Span]]) -> str:
    """Shares of the steps' time, means over ranks. What is between steps, as validation, does not count."""
    seconds = dict.fromkeys(("steps", "compute", "communication", "waiting"), 0.0)
    for spans in ranks:
        steps = [span for span in spans if span.kind == "loop" and span.name.startswith("step ")]
        inside = list(within(spans, steps))
        messages = [span for span in inside if span.kind == "communication"]
        waits = within([span for span in inside if span.kind == "wait"], messages)  # others are of data or agreements
        # Messages between stages are outside of graphs, collectives inside.
        for kind, found in zip(seconds, (steps, segments(inside), messages, waits), strict=True):
            seconds[kind] += sum(span.end - span.begin for span in found)
    total = seconds.pop("steps") or 1.0
    return ", ".join(f"{kind} {value / total:.0%}" for kind, value in seconds.items())


def within(spans: Sequence[Span], others: Sequence[Span]) -> Iterator[Span]:
    """The spans that are inside of one of `others`, which do not overlap."""
    ordered = sorted(others, key=lambda span: span.begin)
    begins = [span.begin for span in ordered]
    for span in spans:
        place = bisect_right(begins, span.begin) - 1
        if place >= 0 and span.end <= ordered[place].end:
            yield span
