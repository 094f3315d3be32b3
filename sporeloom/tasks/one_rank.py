# SPDX-License-Identifier: Apache-2.0
"""Values that one rank computes, and all ranks get, however long it takes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from sporeloom.runtime.engine import Engine

INTERVAL_S = 60.0
"""Seconds after which the other ranks hear that the value is not there yet; each of their waits has a limit."""


def from_log_rank(engine: Engine, compute: Callable[[], Any]) -> Any:
    """A JSON-serializable value that the logging rank computes, in another thread. All ranks call it."""
    mesh = engine.strategy.mesh
    if mesh.size == 1:
        return compute()
    if not engine.is_log_rank:
        while not (told := engine.broadcast_value([], mesh.first_rank_of_last_stage)):
            pass
        return told[0]
    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(compute)
        while not wait([computed], INTERVAL_S).done:
            engine.broadcast_value([], engine.rank)
    return engine.broadcast_value([computed.result()], engine.rank)[0]
