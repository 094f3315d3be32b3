# SPDX-License-Identifier: Apache-2.0
"""Step times of a published run over all plausible values of the settings that its source leaves open."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.published import PublishedRun
from sporeloom.planner.step_time import step_time

KINDS = ("none", "selective", "full")
MICROBATCHES = (1, 2, 4)
LEVELS = (0, 1)
"""ZeRO where a source names no optimizer that shards its state."""


def plausible(run: PublishedRun) -> Iterator[Parallelism]:
    """All strategies that the source of a run allows: recomputation, ZeRO, the size of microbatches, and for experts
    libraries and overlap, where it does not say."""
    job, choices = run.job, dict[str, tuple[dict[str, Any], ...]]()
    if "recompute" in run.assumed:
        choices["recompute"] = tuple({"recompute": kind} for kind in KINDS)
    if "zero" in run.assumed:
        choices["zero"] = tuple({"zero": level} for level in LEVELS)
    if "microbatch" in run.assumed:
        rows = job.microbatch * job.num_microbatches
        sizes = [size for size in MICROBATCHES if rows % size == 0]
        choices["microbatch"] = tuple({"microbatch": size, "num_microbatches": rows // size} for size in sizes)
    if "experts" in run.assumed:
        pairs = itertools.product((False, True), repeat=2)
        choices["experts"] = tuple({"sends_once": library, "overlaps_experts": hidden} for library, hidden in pairs)
    for chosen in itertools.product(*choices.values()):
        yield dataclasses.replace(job, **{name: value for one in chosen for name, value in one.items()})


def seconds_range(run: PublishedRun) -> tuple[float, float]:
    """Seconds of the fastest and the slowest of these; the same twice where nothing is left open."""
    found = [step_time(run.dims, job, run.cluster).total for job in plausible(run)]
    return min(found), max(found)
