# SPDX-License-Identifier: Apache-2.0
"""When a text is finished: conditions on its generated tokens, which compose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Output:
    """What was generated so far."""

    tokens: Sequence[int]
    text: Callable[[], str]
    """Decodes the tokens when it is asked."""


StopCondition = Callable[[Output], bool]


def at_token(ids: Sequence[int]) -> StopCondition:
    """The last token is one of `ids`."""
    wanted = frozenset(ids)
    return lambda output: output.tokens[-1] in wanted


def at_text(texts: Sequence[str]) -> StopCondition:
    """One of `texts` was generated."""
    return lambda output: find_first(output.text(), texts) is not None


def any_of(*conditions: StopCondition) -> StopCondition:
    return lambda output: any(condition(output) for condition in conditions)


def find_first(text: str, wanted: Sequence[str]) -> int | None:
    """Where the first of the `wanted` texts begins."""
    return min((place for place in (text.find(w) for w in wanted) if place >= 0), default=None)


def held_back(text: str, wanted: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a wanted text, or are an unfinished character's."""
    unfinished = len(text) - len(text.rstrip("\ufffd"))
    begun = [n for w in wanted for n in range(1, len(w)) if text.endswith(w[:n])]
    return max([unfinished, *begun])
