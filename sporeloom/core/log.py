# SPDX-License-Identifier: Apache-2.0
"""Milestones of a run, logged once by the logging rank on stderr; numbers go to metrics files."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from sporeloom.core.errors import printable, silence, without_control

T = TypeVar("T")
MARK = "[sporeloom] "


def milestone(text: str) -> None:
    try:
        print(MARK + printable(text), file=sys.stderr, flush=True)
    except BrokenPipeError:  # nobody reads it any more, as in `2>&1 | head`: that ends no work
        silence(sys.stderr)


@functools.cache
def milestone_once(text: str) -> None:
    """Log a milestone only once in a process, and only in the first process."""
    if is_first():
        milestone(text)


def is_first() -> bool:
    """Whether this is the first process of a job."""
    return (os.environ.get("RANK_ID") or "0") == "0"


def print_report(text: str) -> None:
    """Print lines on stdout; control characters in quotations from files are escaped."""
    print("\n".join(map(without_control, text.split("\n"))))


class LogBudget:
    """Limits how much others can cause to be logged: a number of lines of a kind per minute; the rest is counted.

    Args:
        max_lines: of each kind.
        clock: seconds.
    """

    PERIOD_S = 60.0

    def __init__(self, max_lines: int = 5, clock: Callable[[], float] = time.monotonic):
        self._max, self._clock = max_lines, clock
        self._kinds: dict[str, tuple[float, int]] = {}  # when its period began, lines in it

    def take(self, kind: str) -> str | None:
        """Suffix of a line of this kind, with the number of lines left out before it; None: leave it out."""
        now = self._clock()
        since, count = self._kinds.get(kind, (now, 0))
        left_out = 0
        if now - since >= self.PERIOD_S:
            since, left_out, count = now, max(0, count - self._max), 0
        self._kinds[kind] = since, count + 1
        if count >= self._max:
            return None
        return f" ({left_out:,} more like this since the last one)" if left_out else ""

    def log(self, kind: str, text: str) -> None:
        """Log a milestone, unless there were too many of its kind."""
        if (more := self.take(kind)) is not None:
            milestone(text + more)

    def filter(self, record: logging.LogRecord) -> bool:
        """Limits the records of a logger; a kind is a message before its values are inserted."""
        more = self.take(f"{record.name}: {record.msg}"[:200])
        if more:
            record.msg, record.args = record.getMessage() + more, ()
        return more is not None


def counted(number: int, one: str, many: str) -> str:
    """`1 process`, `2 processes`."""
    return f"{number:,} {one if number == 1 else many}"


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Iterate over the items, with a progress bar on stderr if they take longer than two seconds; only in the
    first process."""
    return iter(tqdm(items, desc=MARK + what, delay=2.0, disable=not is_first(), unit="", leave=False))
