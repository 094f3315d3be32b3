# SPDX-License-Identifier: Apache-2.0
"""Timelines in the formats of other tools: MindSpore's memory_block.csv, and counters for Perfetto."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from sporeloom.dry_run.memory.allocator import ALIGNMENT
from sporeloom.dry_run.memory.labels import KINDS
from sporeloom.dry_run.memory.timeline import Timeline

COLUMNS = (
    "start_time_stamp",
    "end_time_stamp",
    "size",
    "actual_used_memory",
    "actual_peak_memory",
    "type",
    "producer_task",
    "node_name",
)
"""Columns of MindSpore's memory tracker. Times are ticks, one for each operator; sizes are rounded up as allocated."""
TYPES = {"parameter": "Weight", "optimizer": "Weight", "constant": "ConstantValue"}
OTHER_TYPE = "KernelOutput"


def memory_block_csv(timeline: Timeline) -> str:
    """Write a row for each allocation, in the order of time; `kind`, `layer` and `address` follow MindSpore's columns."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow([*COLUMNS, "kind", "layer", "address"])
    made = np.flatnonzero(timeline.events > 0)
    sizes = -(-timeline.sizes // ALIGNMENT) * ALIGNMENT
    numbers = timeline.events[made] - 1
    used, ends = timeline.curve(is_aligned=True)[made], timeline.ends()[numbers]
    reserved = np.maximum.accumulate(timeline.addresses[numbers] + sizes[numbers])
    starts = timeline.ticks[made]
    columns = (starts, ends, sizes[numbers], used, reserved, timeline.of_label[numbers], timeline.addresses[numbers])
    for start, end, size, now, peak, of_label, address in zip(*(each.tolist() for each in columns), strict=True):
        if size:
            label = timeline.labels[of_label]
            path, _, task = label.operator.rpartition(": ")
            name, what = path or label.operator, TYPES.get(label.kind, OTHER_TYPE)
            rows.writerow([start, end, size, now, peak, what, task, name, label.kind, label.layer, address])
    return out.getvalue()


def trace(timelines: Mapping[int, Timeline]) -> dict[str, Any]:
    """Counters of the bytes of each kind, for Perfetto and chrome://tracing: a process a rank, a microsecond a tick.

    Args:
        timelines: rank -> its timeline.
    """
    events: list[dict[str, Any]] = []
    for rank, timeline in timelines.items():
        about = {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        events += [about, *_counters(rank, timeline), *_phases(rank, timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _counters(rank: int, timeline: Timeline) -> list[dict[str, Any]]:
    kinds = [kind for kind in KINDS if any(label.kind == kind for label in timeline.labels)]
    of_label = np.array([kinds.index(label.kind) for label in timeline.labels], np.int64)
    numbers = np.abs(timeline.events) - 1
    changes = np.sign(timeline.events) * timeline.sizes[numbers]
    last = np.flatnonzero(np.diff(timeline.ticks, append=timeline.ticks[-1] + 1))  # of each tick
    of_event = of_label[timeline.of_label[numbers]]
    curves = [np.cumsum(np.where(of_event == kind, changes, 0))[last].tolist() for kind in range(len(kinds))]
    ticks = timeline.ticks[last].tolist()
    return [
        {"ph": "C", "pid": rank, "name": "bytes", "ts": tick, "args": dict(zip(kinds, values, strict=True))}
        for tick, *values in zip(ticks, *curves, strict=True)
    ]


def _phases(rank: int, timeline: Timeline) -> list[dict[str, Any]]:
    starts = [start for start, _ in timeline.phases]
    ends = [*starts[1:], int(timeline.ticks[-1])]
    return [
        {"ph": "X", "pid": rank, "tid": 0, "name": name, "cat": "pass", "ts": start, "dur": max(0, end - start)}
        for (start, name), end in zip(timeline.phases, ends, strict=True)
    ]
