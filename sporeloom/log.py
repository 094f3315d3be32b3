# SPDX-License-Identifier: Apache-2.0
"""Milestones of a run, said once by one rank on stderr; numbers go to metrics files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from sporeloom.errors import silence

T = TypeVar("T")
MARK = "[sporeloom] "


def milestone(text: str) -> None:
    try:
        print(MARK + text, file=sys.stderr, flush=True)
    except BrokenPipeError:  # nobody reads it any more, as in `2>&1 | head`: that ends no work
        silence(sys.stderr)


def counted(number: int, one: str, many: str) -> str:
    """`1 process`, `2 processes`."""
    return f"{number:,} {one if number == 1 else many}"


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """The items, with a bar on stderr if they take longer than two seconds; of several processes the first shows it."""
    is_first = (os.environ.get("RANK_ID") or "0") == "0"
    return iter(tqdm(items, desc=MARK + what, delay=2.0, disable=not is_first, unit="", leave=False))
