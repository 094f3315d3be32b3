# SPDX-License-Identifier: Apache-2.0
"""Settings with which MindSpore compiles the same graph faster."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace

from sporeloom.mindspore_compat.names import compile_config, graph_api

FASTER = {"GREED_PARSE": "1", "COMPILE_DEBUG_MODE": "release"}
"""Switches of MindSpore's compiler; versions without one of them compile slower. They are to be set when there is a Cell:
before the first one, `release` hides attributes of objects from the compiler (MindSpore 2.9)."""


def set_faster_switches() -> dict[str, str]:
    """Set the switches of this process that are not set yet. Returns the values before."""
    before = {name: getattr(compile_config, name) for name in FASTER if hasattr(compile_config, name)}
    for name, value in before.items():
        setattr(compile_config, name, value or FASTER[name])  # a user's own setting stays
    return before


@contextlib.contextmanager
def faster_compilation() -> Iterator[None]:
    """Compile the same graph in less time (benchmarks/results/compile_passes.md): with MindSpore's own switches, which
    resolve attributes while parsing and record no history of nodes, and without garbage collection."""
    before = set_faster_switches()
    try:
        with without_collection():
            yield
    finally:
        for name, value in before.items():
            setattr(compile_config, name, value)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection while many small objects without reference cycles are created, and MindSpore's own before
    every compilation, which visits all objects of the process."""
    collects, collector = gc.isenabled(), graph_api.gc
    gc.disable()
    graph_api.gc = SimpleNamespace(collect=lambda: 0)
    try:
        yield
    finally:
        graph_api.gc = collector
        if collects:
            gc.enable()
