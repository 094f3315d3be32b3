# SPDX-License-Identifier: Apache-2.0
"""Values that one rank computes, and all ranks get, however long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Event, Thread
from typing import Any

from sporeloom.runtime.engine import Engine

INTERVAL_S = 60.0
"""Seconds after which the other ranks hear that the value is not there yet; each of their waits has a limit."""


def from_log_rank(engine: Engine, compute: Callable[[], Any], in_main_thread: bool = False) -> Any:
    """A JSON-serializable value that the logging rank computes. All ranks call it.

    Args:
        compute: runs in another thread.
        in_main_thread: it runs in this one, as signals need; only between CPU processes are the others informed meanwhile.
    """
    mesh = engine.strategy.mesh
    if mesh.size == 1:
        return compute()
    if not engine.is_log_rank:
        while not (told := engine.broadcast_value([], mesh.first_rank_of_last_stage)):
            pass
        return told[0]
    tell = partial(engine.broadcast_value, [], engine.rank)
    if in_main_thread:
        with _repeated(tell) if engine.target == "CPU" else nullcontext():
            value = compute()
    else:
        with ThreadPoolExecutor(1) as pool:
            computed = pool.submit(compute)
            while not wait([computed], INTERVAL_S).done:
                tell()
        value = computed.result()
    return engine.broadcast_value([value], engine.rank)[0]


@contextmanager
def _repeated(tell: Callable[[], Any]) -> Iterator[None]:
    """Call a function at intervals, in another thread."""
    is_done = Event()

    def repeat() -> None:
        while not is_done.wait(INTERVAL_S):
            tell()

    thread = Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
