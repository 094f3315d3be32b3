# SPDX-License-Identifier: Apache-2.0
"""Packing of documents into samples: windows of the stream, windows of shuffled documents, or best fit.

Best-fit packing: Ding et al. 2024 (arXiv:2404.10830). All are functions of the tokens, the seed and the epoch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from sporeloom.core.files import write_atomically
from sporeloom.data.arrays import read_arrays
from sporeloom.data.sample_order import Ints, counted_up, shuffled
from sporeloom.data.token_file import TokenFile

Packing = Literal["stream", "shuffled", "best-fit"]
EPOCHS_KEPT = 2
"""Maximum number of document orders in memory: a batch may reach into the next epoch."""


class Arrangement(Protocol):
    """The samples of one dataset, up to T + 1 tokens each: the first T are inputs, the last T their labels."""

    num_samples: int
    """Number of samples in an epoch."""
    num_trained: float
    """Mean number of labels in a sample."""

    def pieces(self, epoch: int, sample: int) -> Ints:
        """(n, 2): starts and ends, in the token file, of the pieces of the sample."""
        ...

    def describe(self) -> str:
        """Text for reports; empty where there is nothing to report."""
        ...


class Stream:
    """Windows of all tokens one after the other."""

    def __init__(self, tokens: TokenFile, seq_len: int):
        self._tokens, self._seq_len = tokens, seq_len
        self.num_samples, self.num_trained = tokens.num_samples(seq_len), float(seq_len)

    def pieces(self, epoch: int, sample: int) -> Ints:
        start = self._tokens.start(sample, self._seq_len)
        return np.array([[start, start + self._seq_len + 1]])

    def describe(self) -> str:
        return ""


class ShuffledStream:
    """Windows of all documents one after the other, in another order in each epoch.

    Args:
        key: of the orders.
    """

    def __init__(self, tokens: TokenFile, seq_len: int, key: int):
        self._ends, self._seq_len, self._key = tokens.ends, seq_len, key
        self.num_samples, self.num_trained = tokens.num_samples(seq_len), float(seq_len)
        self._order = lru_cache(EPOCHS_KEPT)(self._order_of)

    def _order_of(self, epoch: int) -> tuple[Ints, Ints]:
        """Positions of the documents in their order, and where each ends among the tokens in that order."""
        count = len(self._ends)
        order = shuffled(np.arange(count), count, self._key + epoch * 0x9E3779B97F4A7C15)
        lengths = np.diff(self._ends, prepend=0)
        return order, np.cumsum(lengths[order])

    def pieces(self, epoch: int, sample: int) -> Ints:
        order, ends = self._order(epoch)
        start, stop = sample * self._seq_len, (sample + 1) * self._seq_len + 1
        first, last = np.searchsorted(ends, [start, stop - 1], "right")
        documents = order[first : last + 1]
        stops = np.asarray(self._ends[documents])
        begins = np.where(documents > 0, self._ends[np.maximum(documents - 1, 0)], 0)
        begins[0] += start - (ends[first - 1] if first else 0)
        stops[-1] -= ends[last] - stop
        return np.stack([begins, stops], axis=1)

    def describe(self) -> str:
        return "documents shuffled"


class BestFit:
    """Documents that fit into a sample are never split: each goes, longest first, where the least room is left.

    Longer ones are cut into whole samples and a rest, which is packed. What stays free is padding.

    Args:
        path: where the packing is, see `save_packing`.
    """

    def __init__(self, tokens: TokenFile, seq_len: int, path: Path):
        self._pieces, self._ends = read_arrays(path, "pieces", "ends")
        self.num_samples = len(self._ends)
        lengths = self._pieces[:, 1] - self._pieces[:, 0]
        self.num_trained = (int(lengths.sum()) - self.num_samples) / max(1, self.num_samples)
        self._padding = 1 - int(lengths.sum()) / max(1, self.num_samples * (seq_len + 1))
        self._cut = int((np.diff(tokens.ends, prepend=0) > seq_len + 1).sum())
        self._documents = len(tokens.ends)

    def pieces(self, epoch: int, sample: int) -> Ints:
        return self._pieces[self._ends[sample - 1] if sample else 0 : self._ends[sample]]

    def describe(self) -> str:
        return f"best fit: {self._padding:.2%} padding, {self._cut:,} of {self._documents:,} documents split"


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Assign items to rows of this length: longest first, each where the least room is left that is enough; of
    equal ones the first. No item is longer than a row."""
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    waiting = 0  # bit n: there are rows with room n
    for place in order:
        length = lengths[place]
        enough = waiting >> length
        if not enough:
            rows.append([])
            row, left = len(rows) - 1, room
        else:
            left = length + (enough & -enough).bit_length() - 1
            row = by_room[left].pop()
            if not by_room[left]:
                waiting ^= 1 << left
        rows[row].append(place)
        if rest := left - length:
            by_room.setdefault(rest, []).append(row)
            waiting |= 1 << rest
    return rows


def save_packing(tokens: TokenFile, seq_len: int, path: Path) -> None:
    """Pack the documents of a token file and write the positions of each sample's pieces."""
    ends, room = np.asarray(tokens.ends), seq_len + 1
    lengths = np.diff(ends, prepend=0)
    begins = ends - lengths
    # Parts of a long document overlap by a token, so that each token but its first is predicted.
    whole = np.where(lengths > room, (lengths - 1) // seq_len, 0)
    full_begins = np.repeat(begins, whole) + seq_len * counted_up(whole)
    rests = np.stack([begins + whole * seq_len, ends], axis=1)
    rests = rests[(whole == 0) | (lengths - whole * seq_len > 1)]
    rows = best_fit((rests[:, 1] - rests[:, 0]).tolist(), room)
    packed = rests[[place for row in rows for place in row]] if rows else rests
    pieces = np.concatenate([np.stack([full_begins, full_begins + room], axis=1), packed])
    counts = np.concatenate([np.ones(len(full_begins), np.int64), [len(row) for row in rows]]).astype(np.int64)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            np.savez(file, pieces=pieces, ends=np.cumsum(counts))

    write_atomically(path, write)
