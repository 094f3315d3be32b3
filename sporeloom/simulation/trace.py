# SPDX-License-Identifier: Apache-2.0
"""A window of a simulated run as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sporeloom.simulation.job import Span

THREADS = ("training", "checkpoints", "down", "repairs")
"""Rows of the trace."""


def trace(spans: Iterable[Span], begin_s: float, end_s: float) -> dict[str, Any]:
    """Spans of a run that lie in a window, as far as they do. Times are those of the run, in microseconds."""
    return {"traceEvents": [*_rows(), *_events(spans, begin_s, end_s)], "displayTimeUnit": "ms"}


def _rows() -> Iterator[dict[str, Any]]:
    for number, name in enumerate(THREADS):
        yield {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}


def _events(spans: Iterable[Span], begin_s: float, end_s: float) -> Iterator[dict[str, Any]]:
    for span in spans:
        start, end = max(span.start_s, begin_s), min(span.end_s, end_s)
        if start < end:
            times = {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
            yield {"ph": "X", "pid": 0, "tid": THREADS.index(span.row), "name": span.name, **times}
