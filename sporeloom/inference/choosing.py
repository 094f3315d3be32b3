# SPDX-License-Identifier: Apache-2.0
"""Choices of tokens as the ranks of a job exchange them: one rank chooses and broadcasts.

A row has a place for each token that a step may give it: one, and one more for each drafted token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sporeloom.inference.sampling import TokenScore

NOTHING = 127
"""Stands for a place where no token was chosen."""


@dataclass(frozen=True)
class Choice:
    """A token that was chosen for a row; or what came instead."""

    token: int
    log_probability: float
    code: int
    """Why it is the last one; 0: it is not. Negative: the row has failed."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Chosen:
    """The choices of a row in one step."""

    choices: Sequence[Choice]
    is_tail_finite: bool = True
    """Whether the logits after drafted tokens that were not chosen are finite. If they are not, neither may be what these
    tokens left in the caches."""


def packed(chosen: Sequence[Chosen], sizes: Sequence[int]) -> NDArray[np.int32]:
    """Numbers to broadcast, (3, places): token, log-probability as bits, code."""
    told = np.zeros((3, sum(sizes)), np.int32)
    told[2] = NOTHING
    for of_row, start, size in zip(chosen, _starts(sizes), sizes, strict=True):
        for place, choice in enumerate(of_row.choices, start):
            told[:, place] = choice.token, np.float32(choice.log_probability).view(np.int32), choice.code
        if len(of_row.choices) < size:
            told[0, start + size - 1] = not of_row.is_tail_finite
    return told


def unpacked(told: NDArray[np.int32], sizes: Sequence[int], chosen: Sequence[Chosen] | None) -> list[Chosen]:
    """The choices of all rows, as broadcast. `chosen`: on the rank that chose, which knows the alternatives."""
    found = []
    for number, (start, size) in enumerate(zip(_starts(sizes), sizes, strict=True)):
        count = int((told[2, start : start + size] != NOTHING).sum())
        choices = [
            Choice(int(token), float(bits.view(np.float32)), int(code))
            for token, bits, code in told.T[start : start + count]
        ]
        if chosen:
            tops = [choice.top for choice in chosen[number].choices]
            choices = [Choice(c.token, c.log_probability, c.code, top) for c, top in zip(choices, tops, strict=True)]
        found.append(Chosen(choices, count == size or not told[0, start + size - 1]))
    return found


def score_of(score: TokenScore | None, token: int, code: int) -> Choice:
    """The choice of a scored token; of none, where only the prompt is scored."""
    return Choice(token, score.log_probability, code, score.top) if score else Choice(token, 0.0, code)


def _starts(sizes: Sequence[int]) -> list[int]:
    return np.cumsum([0, *sizes])[:-1].tolist()
