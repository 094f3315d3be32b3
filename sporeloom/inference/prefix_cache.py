# SPDX-License-Identifier: Apache-2.0
"""Keys and values of prompts that outlive their rows, in blocks of tokens that requests with the same beginning share.

A block is found by its tokens and by the block before it, so that all blocks form a tree. It holds copies: what a request
gets is what it would have computed, to the bit. Every rank takes the same decisions and holds its own part of the numbers.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

MIN_BLOCK = 16
"""Tokens of a block, at least."""

Numbers = Sequence[NDArray[Any]]


class Slots(Protocol):
    """Rows of slots whose numbers can be copied (`sporeloom.inference.decoding.CacheDecoder`)."""

    reusable: int
    num_rows: int
    num_replicas: int

    def read_slots(self, row: int, start: int, stop: int) -> Numbers: ...

    def restore(self, row: int, start: int, count: int, blocks: Sequence[Numbers]) -> None: ...


@dataclass
class _Block:
    id: int
    numbers: Numbers = field(repr=False)


class PrefixCache:
    """Blocks of tokens and their numbers, the ones that were used last.

    Ranks that compute for other rows of the batch have other blocks: a row finds those of its own replica.

    Args:
        num_blocks: blocks of a replica, at most.
        block: tokens of a block.
    """

    def __init__(self, slots: Slots, num_blocks: int, block: int):
        self._slots, self.num_blocks, self.block = slots, num_blocks, block
        self._ids = itertools.count()
        # The one that was used longest ago first. A block is used whenever one behind it is, and counts as used later.
        self._blocks: list[OrderedDict[Hashable, _Block]] = [OrderedDict() for _ in range(slots.num_replicas)]

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def num_found(self, row: int, owner: Hashable, tokens: Sequence[int]) -> int:
        """Number of tokens at the beginning of a text that `restore` would find."""
        return self.block * sum(1 for _ in self._path(row, owner, tokens))

    def restore(self, row: int, owner: Hashable, tokens: Sequence[int], held: int) -> int:
        """Give a row the tokens that are found, of which it holds `held` already. Returns the number that it holds then."""
        path = list(self._path(row, owner, tokens))
        self._use(row, [key for key, _ in path])
        first = held // self.block
        blocks = [block.numbers for _, block in path[first:]]
        if not blocks:
            return held
        self._slots.restore(row, first * self.block, self.block, blocks)
        return len(path) * self.block

    def keep(self, row: int, owner: Hashable, tokens: Sequence[int]) -> None:
        """Copy the full blocks of what a row holds, those that are not there yet."""
        blocks, used, parent = self._of(row), list[Hashable](), owner
        self._use(row, [key for key, _ in self._path(row, owner, tokens)])  # so that others are dropped
        for place in range(min(len(tokens) // self.block, self.num_blocks)):
            start, stop = place * self.block, (place + 1) * self.block
            key = parent, tuple(tokens[start:stop])
            if key not in blocks:
                if len(blocks) == self.num_blocks:
                    blocks.popitem(last=False)
                blocks[key] = _Block(next(self._ids), self._slots.read_slots(row, start, stop))
            used.append(key)
            parent = blocks[key].id
        self._use(row, used)

    def _of(self, row: int) -> OrderedDict[Hashable, _Block]:
        return self._blocks[row // (self._slots.num_rows // self._slots.num_replicas)]

    def _path(self, row: int, owner: Hashable, tokens: Sequence[int]) -> Iterator[tuple[Hashable, _Block]]:
        blocks, parent = self._of(row), owner
        for start in range(0, len(tokens) - self.block + 1, self.block):
            key = parent, tuple(tokens[start : start + self.block])
            block = blocks.get(key)
            if block is None:
                return
            yield key, block
            parent = block.id

    def _use(self, row: int, path: Sequence[Hashable]) -> None:
        blocks = self._of(row)
        for key in reversed(path):
            blocks.move_to_end(key)


def prefix_cache(slots: Slots, bytes_of_token: int, num_bytes: int) -> PrefixCache | None:
    """A cache of at most so many bytes on all devices together; None where it has no room for a block, or where what a row
    holds cannot be reused."""
    if not slots.reusable:
        return None
    block = -(-MIN_BLOCK // slots.reusable) * slots.reusable
    num_blocks = num_bytes // (bytes_of_token * block * slots.num_replicas)
    return PrefixCache(slots, num_blocks, block) if num_blocks else None
