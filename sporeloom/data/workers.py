# SPDX-License-Identifier: Apache-2.0
"""Run a function over many items in several processes: results in order, a bounded number of items under way."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from sporeloom.core.errors import ConfigError
from sporeloom.core.processes import end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")
_work: Callable[[Any], Any] | None = None


class WorkersLostError(ConfigError):
    """A worker process ended from outside."""


def ordered_map(
    make_work: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Yield `make_work()(item)` for every item. `workers` processes make their work once each; 0: here, without a
    process.

    Raises:
        WorkersLostError: a process ended from outside.
    """
    if workers == 0:
        work = make_work()
        yield from map(work, items)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (make_work, os.getpid()))
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(_one, item))
            if len(pending) > 2 * workers + 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise WorkersLostError(
            "a worker process was ended from outside, perhaps because memory ran out; try fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(make_work: Callable[[], Callable[[Any], Any]], parent: int) -> None:
    global _work
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports it
    _work = make_work()


def _one(item: Any) -> Any:
    assert _work is not None
    return _work(item)
