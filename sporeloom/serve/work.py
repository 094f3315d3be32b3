# SPDX-License-Identifier: Apache-2.0
"""Threads for what takes a while, tokenizing and rendering: the event loop continues meanwhile, and no kind of it takes all
threads from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from sporeloom.serve.fields import RequestError

Result = TypeVar("Result")


class Workers:
    """A few threads with a queue.

    Args:
        num_threads: running at once. Few: a tokenizer in C++ keeps all of Python waiting while it works.
        max_waiting: callers that may wait; more are refused.
    """

    def __init__(self, num_threads: int, max_waiting: int):
        self._limiter, self._max_waiting = CapacityLimiter(num_threads), max_waiting

    async def run(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run `work` in a thread and return its result.

        Raises:
            RequestError: too many wait.
        """
        if self._limiter.statistics().tasks_waiting >= self._max_waiting:
            raise too_many("requests wait")
        return await to_thread.run_sync(work, *arguments, limiter=self._limiter)


def too_many(what: str) -> RequestError:
    return RequestError(429, f"too many {what}; try again later", headers={"Retry-After": "1"})
