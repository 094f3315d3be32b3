# SPDX-License-Identifier: Apache-2.0
"""A memory pool as devices have it: best fit, blocks are split and joined again, addresses are aligned."""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 512
"""Bytes to which MindSpore's pool rounds every allocation up."""


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Bytes that an allocation takes; an empty one takes none."""
    return -(-num_bytes // alignment) * alignment


class Pool:
    """Addresses from 0 up. What is freed is used again if it is large enough; otherwise the pool grows."""

    def __init__(self, alignment: int = ALIGNMENT):
        self.alignment = alignment
        self.reserved = 0
        """Bytes up to the highest address that was ever used."""
        self._free: list[tuple[int, int]] = []
        """Size and address of each free block, in order: the first that is large enough fits best."""
        self._size_at: dict[int, int] = {}
        """Address of a free block -> its size."""
        self._ending_at: dict[int, int] = {}
        """End of a free block -> its address."""

    def allocate(self, num_bytes: int) -> int:
        """Allocate bytes and return their address."""
        size = aligned(num_bytes, self.alignment)
        if not size:
            return 0
        position = bisect_left(self._free, (size, -1))
        if position < len(self._free):
            length, address = self._free[position]
            self._remove(length, address)
            if length > size:
                self._insert(length - size, address + size)
            return address
        address = self.reserved
        if (start := self._ending_at.get(self.reserved)) is not None:  # the last block grows
            address = start
            self._remove(self._size_at[start], start)
        self.reserved = address + size
        return address

    def free(self, address: int, num_bytes: int) -> None:
        """Free an allocation of so many bytes, and join the block with its free neighbours."""
        size = aligned(num_bytes, self.alignment)
        if not size:
            return
        if (before := self._ending_at.get(address)) is not None:
            length = self._size_at[before]
            self._remove(length, before)
            address, size = before, size + length
        if (length := self._size_at.get(address + size, 0)) > 0:
            self._remove(length, address + size)
            size += length
        self._insert(size, address)

    @property
    def free_blocks(self) -> list[tuple[int, int]]:
        """Address and size of each free block, by address."""
        return sorted((address, size) for size, address in self._free)

    def _insert(self, size: int, address: int) -> None:
        insort(self._free, (size, address))
        self._size_at[address], self._ending_at[address + size] = size, address

    def _remove(self, size: int, address: int) -> None:
        del self._free[bisect_left(self._free, (size, address))]
        del self._size_at[address], self._ending_at[address + size]
