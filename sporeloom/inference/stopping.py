# SPDX-License-Identifier: Apache-2.0
"""Rules that find where a generated text ends; they compose. Each takes the text so far and returns a position;
None: not yet.

A rule also takes the number of characters that an earlier call had and found no end in: it need not read them again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol


class StopCondition(Protocol):
    def __call__(self, text: str, known: int = 0, /) -> int | None: ...


def at_text(texts: Sequence[str]) -> StopCondition:
    """Find the end before the first of `texts`."""

    def ending(text: str, known: int = 0) -> int | None:
        places = (text.find(each, max(0, known - len(each) + 1)) for each in texts)
        return min((place for place in places if place >= 0), default=None)

    return ending


def at_dedent() -> StopCondition:
    """Find the end before the first line that is not indented: a continued Python function has ended there."""

    def ending(text: str, known: int = 0) -> int | None:
        start = text.rfind("\n", 0, known) + 1
        for line in text[start:].split("\n"):
            if line.strip() and line[0] not in " \t":
                return start
            start += len(line) + 1
        return None

    return ending


def at_closed_brace() -> StopCondition:
    """Find the end after the brace that closes what the prompt opened: the first to close more than the text
    itself opens."""

    def ending(text: str, known: int = 0) -> int | None:
        depth = text.count("{", 0, known) - text.count("}", 0, known)
        for place, character in enumerate(text[known:], known):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth < 0:
                return place + 1
        return None

    return ending


def first_of(*endings: StopCondition) -> StopCondition:
    """Combine several endings: the earliest one counts."""

    def first(text: str, known: int = 0) -> int | None:
        return min((end for end in (ending(text, known) for ending in endings) if end is not None), default=None)

    return first


def held_back(text: str, wanted: Sequence[str]) -> int:
    """Number of characters at the end that may be the beginning of a stop sequence, or belong to an incomplete
    character."""
    unfinished = len(text) - len(text.rstrip("\ufffd"))
    return max([unfinished, *(_begun(text, each) for each in wanted)])


def _begun(text: str, wanted: str) -> int:
    """Number of characters at the end of a text that are the beginning of a longer one, at most; in linear time."""
    tail = text[max(0, len(text) - len(wanted) + 1) :]
    start = tail.find(wanted[:1])
    if start < 0 or not tail:
        return 0
    borders, matched = _borders(wanted), 0
    for character in tail[start:]:
        while matched and wanted[matched] != character:
            matched = borders[matched - 1]
        matched += wanted[matched] == character
    return matched


@lru_cache(maxsize=256)
def _borders(wanted: str) -> Sequence[int]:
    """For each prefix of a text, the length of its longest proper prefix that it also ends with.

    Source: D. E. Knuth, J. H. Morris, V. R. Pratt, Fast pattern matching in strings, 1977.
    """
    result, length = array("L", [0]), 0
    for character in wanted[1:]:
        while length and wanted[length] != character:
            length = result[length - 1]
        length += wanted[length] == character
        result.append(length)
    return result
