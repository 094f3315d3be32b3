# SPDX-License-Identifier: Apache-2.0
"""Sample a corpus of any size for a trainer that holds its text in memory: at most a number of passages, the same on each
run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_PASSAGE_CHARS = 1000
"""SentencePiece skips sentences of more than 4192 bytes."""
MAX_PASSAGES = 100_000


class Passage(NamedTuple):
    """A part of a document."""

    number: int
    """Index in the corpus."""
    document: int
    text: str


class PassageSample(NamedTuple):
    """The sample of a corpus."""

    texts: list[str]
    """Passages in the order of the corpus; those that follow each other in one document are one text."""
    num_passages: int
    """Number of passages of the corpus."""
    num_chosen: int


def sample_passages(documents: Iterable[str], max_passages: int = MAX_PASSAGES, seed: int = 1) -> PassageSample:
    """Sample passages uniformly, without more than `max_passages` in memory; a corpus of fewer is returned as it is.

    Source: Vitter 1985, Random sampling with a reservoir, algorithm R.
    """
    chosen, number, generator = list[Passage](), -1, random.Random(seed)
    for passage in _passages(documents):
        number = passage.number
        if number < max_passages:
            chosen.append(passage)
        elif (slot := int(generator.random() * (number + 1))) < max_passages:
            chosen[slot] = passage
    chosen.sort()
    return PassageSample(list(_joined(chosen)), number + 1, len(chosen))


def cut_passages(text: str) -> Iterator[str]:
    """Parts of at most MAX_PASSAGE_CHARS characters, which end at line breaks where lines are shorter than that."""
    start = 0
    while len(text) - start > MAX_PASSAGE_CHARS:
        end = text.rfind("\n", start, start + MAX_PASSAGE_CHARS) + 1 or start + MAX_PASSAGE_CHARS
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _passages(documents: Iterable[str]) -> Iterator[Passage]:
    number = 0
    for document, text in enumerate(documents):
        for part in cut_passages(text):
            yield Passage(number, document, part)
            number += 1


def _joined(passages: Iterable[Passage]) -> Iterator[str]:
    parts, last = list[str](), Passage(-1, -1, "")
    for passage in passages:
        if parts and passage[:2] != (last.number + 1, last.document):
            yield "".join(parts)
            parts = []
        parts.append(passage.text)
        last = passage
    if parts:
        yield "".join(parts)
