# SPDX-License-Identifier: Apache-2.0
"""Keys and values of prompts that outlive their rows, in blocks of tokens that requests with the same beginning share.

A block is found by its tokens and by the block before it, so that all blocks form a tree. It holds copies: what a request
gets is what it would have computed, to the bit. Every rank takes the same decisions and holds its own part of the numbers.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

MIN_BLOCK = 16
"""Tokens of a block, at least."""

Numbers = Sequence[NDArray[Any]]


class Store(Protocol):
    """Blocks that outlive the process (`sporeloom.inference.prefix_store.BlockStore`)."""

    def root(self, owner: Hashable) -> bytes | None: ...

    def child(self, parent: bytes, tokens: Sequence[int]) -> bytes: ...

    def load(self, name: bytes) -> Numbers | None: ...

    def save(self, name: bytes, numbers: Numbers) -> None: ...

    def use(self, name: bytes) -> None: ...

    def close(self, blocks: Iterable[tuple[bytes, Numbers]]) -> None: ...


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
    name: bytes | None = None
    """Its name in the store; None: it is not to be stored."""


class PrefixCache:
    """Blocks of tokens and their numbers, the ones that were used last.

    Ranks that compute for other rows of the batch have other blocks: a row finds those of its own replica.

    Args:
        num_blocks: blocks of a replica, at most.
        block: tokens of a block.

    Attributes:
        store: blocks that have left the memory, and those of earlier processes; of one replica.
    """

    store: Store | None = None

    def __init__(self, slots: Slots, num_blocks: int, block: int):
        self._slots, self.num_blocks, self.block = slots, num_blocks, block
        self._ids = itertools.count()
        # The one that was used longest ago first. A block is used whenever one behind it is, and counts as used later.
        self._blocks: list[OrderedDict[Hashable, _Block]] = [OrderedDict() for _ in range(slots.num_replicas)]

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def num_found(self, row: int, owner: Hashable, tokens: Sequence[int]) -> int:
        """Number of tokens at the beginning of a text that `restore` would find."""
        return self.block * sum(1 for _ in self._path(row, owner, tokens, loads=True))

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
        name = self.store.root(owner) if self.store else None
        self._use(row, [key for key, _ in self._path(row, owner, tokens)])  # so that others are dropped
        for place in range(min(len(tokens) // self.block, self.num_blocks)):
            start, stop = place * self.block, (place + 1) * self.block
            key = parent, tuple(tokens[start:stop])
            if key not in blocks:
                name = self.store.child(name, key[1]) if self.store and name else None
                self._add(blocks, key, _Block(next(self._ids), self._slots.read_slots(row, start, stop), name))
            used.append(key)
            parent, name = blocks[key].id, blocks[key].name
        self._use(row, used)

    def _of(self, row: int) -> OrderedDict[Hashable, _Block]:
        return self._blocks[row // (self._slots.num_rows // self._slots.num_replicas)]

    def close(self) -> None:
        """Store all blocks that can be stored."""
        if self.store:
            blocks = [block for of_replica in self._blocks for block in of_replica.values()]
            self.store.close((block.name, block.numbers) for block in blocks if block.name)

    def _add(self, blocks: OrderedDict[Hashable, _Block], key: Hashable, block: _Block) -> None:
        if len(blocks) == self.num_blocks:
            _, oldest = blocks.popitem(last=False)
            if self.store and oldest.name:
                self.store.save(oldest.name, oldest.numbers)
        blocks[key] = block

    def _path(
        self, row: int, owner: Hashable, tokens: Sequence[int], loads: bool = False
    ) -> Iterator[tuple[Hashable, _Block]]:
        """The blocks that a text begins with. `loads`: stored ones are read into the memory; `restore` takes the same ones
        later, whatever has been stored meanwhile."""
        blocks, parent, path = self._of(row), owner, list[Hashable]()
        name = self.store.root(owner) if loads and self.store else None
        has_loaded = False
        for start in range(0, len(tokens) - self.block + 1, self.block):
            key = parent, tuple(tokens[start : start + self.block])
            block = blocks.get(key)
            if block is None and name and len(path) < self.num_blocks:
                # The first load makes the path the newest; later ones are newer still, so that others are dropped.
                block = self._load(row, key, name, () if has_loaded else path)
                has_loaded = has_loaded or block is not None
            if block is None:
                break
            yield key, block
            path.append(key)
            parent, name = block.id, block.name if loads else None
        if has_loaded:
            self._use(row, path)

    def _load(
        self, row: int, key: tuple[Hashable, tuple[int, ...]], before: bytes, path: Sequence[Hashable]
    ) -> _Block | None:
        """Read a stored block into the memory. `before`: the name of the block before it; `path`: blocks to use first, so
        that none of them is dropped."""
        if not self.store:
            return None
        name = self.store.child(before, key[1])
        numbers = self.store.load(name)
        if numbers is None:
            return None
        self._use(row, path)
        block = _Block(next(self._ids), numbers, name)
        self._add(self._of(row), key, block)
        return block

    def _use(self, row: int, path: Sequence[Hashable]) -> None:
        blocks = self._of(row)
        for key in reversed(path):
            blocks.move_to_end(key)
            if self.store and (name := blocks[key].name):
                self.store.use(name)


def block_tokens(reusable: int) -> int:
    """Tokens of a block, where multiples of `reusable` can be reused."""
    return -(-MIN_BLOCK // reusable) * reusable


def prefix_cache(slots: Slots, bytes_of_token: int, num_bytes: int) -> PrefixCache | None:
    """A cache of at most so many bytes on all devices together; None where it has no room for a block, or where what a row
    holds cannot be reused."""
    if not slots.reusable:
        return None
    block = block_tokens(slots.reusable)
    num_blocks = num_bytes // (bytes_of_token * block * slots.num_replicas)
    return PrefixCache(slots, num_blocks, block) if num_blocks else None
