# SPDX-License-Identifier: Apache-2.0
"""Spans of time of this process: what it computes, communicates and waits for, while they are recorded."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

Kind = Literal["loop", "graph", "communication", "wait"]
now = time.monotonic
"""Seconds on a clock that all processes of a machine share."""


class Span(NamedTuple):
    """From `begin` to `end`, by `now`."""

    kind: Kind
    name: str
    begin: float
    end: float


class Trace:
    """Recorder of the spans of a process; it records nothing until `begin`."""

    def __init__(self) -> None:
        self._spans: list[Span] | None = None

    @property
    def is_on(self) -> bool:
        return self._spans is not None

    def begin(self) -> None:
        """Record from now on."""
        self._spans = []

    def end(self) -> list[Span]:
        """Stop recording. Returns the spans since `begin`, in the order in which they ended."""
        spans, self._spans = self._spans or [], None
        return spans

    def add(self, kind: Kind, name: str, begin: float) -> None:
        """Record a span that ends now."""
        if self._spans is not None:
            self._spans.append(Span(kind, name, begin, now()))


TRACE = Trace()
"""The recorder of this process, which has one engine."""
