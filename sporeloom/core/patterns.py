# SPDX-License-Identifier: Apache-2.0
"""Regular expressions from somebody else's file, matched by Python's own `re` in a process with limits: one may
never end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from sporeloom.core.bounded_process import MEMORY_BYTES, BoundedProcess, serve

Pattern = tuple[Literal["match", "fullmatch"], str]
"""A function of `re`, and the expression."""
Found = dict[str, dict[str, str | None]]
"""Each name that a pattern matches -> its named groups."""
MATCHER = BoundedProcess("sporeloom.core.patterns", "to match its patterns")
"""The bounded process of this process."""


def match_patterns(patterns: Iterable[Pattern], names: Sequence[str]) -> dict[Pattern, Found | str]:
    """Match each pattern against some names; a text that is not a regular expression gets the reason.

    Raises:
        ConfigError: together they take too much time or memory.
    """
    asked = list(dict.fromkeys(patterns))
    if not asked:
        return {}
    found = MATCHER.ask(patterns=asked, names=list(names))["found"]
    return dict(zip(asked, found, strict=True))


def answer(line: bytes) -> dict[str, Any]:
    """The other process's side of `match_patterns`."""
    asked = json.loads(line)
    try:
        return {"found": [_matches(how, pattern, asked["names"]) for how, pattern in asked["patterns"]]}
    except MemoryError:
        return {"error": f"matching its patterns takes more than {MEMORY_BYTES >> 20} MB of memory"}


def _matches(how: str, pattern: str, names: Sequence[str]) -> Found | str:
    try:
        find = getattr(re.compile(pattern), how)
    except (re.error, OverflowError) as error:
        return str(error)
    except RecursionError:
        return "nested too deeply"
    return {name: match.groupdict() for name in names if (match := find(name))}


def main() -> None:
    """Answer until standard input ends."""
    serve(answer)
