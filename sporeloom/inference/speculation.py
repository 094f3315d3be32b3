# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: tokens are drafted, and one step of the model computes the logits after all of them.

A drafted token is never taken for its own sake: each token is chosen from the model's logits as it is without drafts, with
the request's own random numbers, penalties and grammar. Where it equals the draft, the next one is chosen in the same step.
So the tokens and their log-probabilities are the same.

Sources: arXiv:2211.17192 (speculative decoding), arXiv:2304.04487 (drafts copied from the prompt).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2
FIRST_LENGTH = 4
"""Tokens of the first draft of a text."""


class Drafter(ABC):
    """Proposes tokens that may follow the texts of rows. Every rank proposes the same."""

    is_costly: ClassVar[bool] = False
    """Whether a token that is not verified was a waste of time."""
    cache_bytes: int = 0

    @abstractmethod
    def prepare(self) -> None:
        """Compile what proposals need, unless that is done."""

    @abstractmethod
    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """A text begins in a row, with a prompt and its first token."""

    @abstractmethod
    def add(self, row: int, tokens: Sequence[int]) -> None:
        """The next tokens of a row's text."""

    @abstractmethod
    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Up to so many tokens for each of some rows; rows without a proposal are left out."""

    @abstractmethod
    def end(self, row: int) -> None:
        """The text of a row has ended."""

    @abstractmethod
    def stepped(self, num_tokens: int, seconds: float) -> None:
        """A step without parts of prompts took so long for the last tokens of all rows and their drafts."""

    @abstractmethod
    def verified(self, num_drafted: int, num_right: int) -> None:
        """So many tokens of a draft were right."""


class Ngrams:
    """The last place of each n-gram of a text, in linear time."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            end = len(self._tokens)
            for length in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, end) + 1):
                self._after[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """Copy what followed the longest n-gram at the end where it was last; a text that repeats itself continues so."""
        for length in range(min(LONGEST_NGRAM, len(self._tokens)), SHORTEST_NGRAM - 1, -1):
            start = self._after.get(tuple(self._tokens[-length:]))
            if start is not None:
                period = len(self._tokens) - start
                return [self._tokens[start + place % period] for place in range(count)]
        return []


class NgramDrafter(Drafter):
    """Drafts from the text itself."""

    def __init__(self) -> None:
        self._rows: dict[int, Ngrams] = {}

    def prepare(self) -> None:
        pass

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self._rows[row] = Ngrams(tokens)

    def add(self, row: int, tokens: Sequence[int]) -> None:
        self._rows[row].add(tokens)

    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        found = {row: self._rows[row].propose(count) for row, count in counts.items()}
        return {row: draft for row, draft in found.items() if draft}

    def end(self, row: int) -> None:
        self._rows.pop(row, None)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        pass

    def verified(self, num_drafted: int, num_right: int) -> None:
        pass


Drafts = Mapping[int, Sequence[int]]
"""Tokens by rows."""


def _whole(drafts: Drafts) -> Drafts:
    return drafts


class Speculation:
    """The drafts of all rows. They grow while they are right, and shrink to what was right of them.

    Args:
        most: tokens of a draft, at most.
    """

    def __init__(self, drafter: Drafter, most: int):
        self.drafter, self.most = drafter, most
        self._lengths: dict[int, int] = {}
        self._begun: tuple[float, int] | None = None
        """Start of the step that is to be timed, and its number of tokens."""
        self.num_drafts = self.drafted = self.accepted = 0
        """Number of drafts, of their tokens, and of those that were right."""

    def draft(
        self, room: Mapping[int, int], cut_drafts: Callable[[Drafts], Drafts] = _whole, is_timed: bool = False
    ) -> Drafts:
        """Drafts for rows that still have room for so many tokens, shortened by `cut_drafts` to what a step has room for.

        Args:
            is_timed: whether the step that begins now computes nothing but these rows and their drafts.
        """
        drafts = self._propose(room, cut_drafts)
        num_tokens = len(room) + sum(len(draft) for draft in drafts.values())
        self._begun = (time.perf_counter(), num_tokens) if is_timed else None
        return drafts

    def _propose(self, room: Mapping[int, int], cut_drafts: Callable[[Drafts], Drafts]) -> Drafts:
        counts = {row: min(self._lengths[row], most) for row, most in room.items() if row in self._lengths and most > 0}
        if self.drafter.is_costly:
            places = cut_drafts({row: range(count) for row, count in counts.items()}) if counts else {}
            counts = {row: len(each) for row, each in places.items()}
        drafts = self.drafter.propose(counts) if counts else {}
        return cut_drafts(drafts) if drafts else {}

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """Begin to draft for a row."""
        self._lengths[row] = min(FIRST_LENGTH, self.most)
        self.drafter.begin(row, tokens)

    def verified(self, row: int, draft: Sequence[int], tokens: Sequence[int]) -> None:
        """Record the tokens that a step made for a row, the first one not drafted; the text continues."""
        if self._begun:
            begin, num_tokens = self._begun
            self.drafter.stepped(num_tokens, time.perf_counter() - begin)
            self._begun = None
        right = sum(1 for each, token in zip(draft, tokens, strict=False) if each == token)
        if draft:
            self.drafter.verified(len(draft), right)
            self.num_drafts += 1
            self.drafted += len(draft)
            self.accepted += right
            self._lengths[row] = min(self.most, 2 * len(draft)) if right == len(draft) else max(1, right)
        if row in self._lengths:
            self.drafter.add(row, tokens)

    def end(self, row: int) -> None:
        """Stop drafting for a row."""
        if self._lengths.pop(row, None) is not None:
            self.drafter.end(row)


def cut(drafts: Mapping[int, Sequence[int]], room: int) -> dict[int, Sequence[int]]:
    """Shorten drafts that share room for so many tokens, the longest ones most."""
    kept: dict[int, Sequence[int]] = {}
    for place, (row, draft) in enumerate(sorted(drafts.items(), key=lambda pair: (len(pair[1]), pair[0]))):
        share = room // (len(drafts) - place)
        if share:
            kept[row] = draft[:share]
            room -= len(kept[row])
    return kept
