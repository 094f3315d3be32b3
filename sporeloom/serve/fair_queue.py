# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting texts get a row: the clients in turn, and of each by priority."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """A queue whose order depends on what was put in, and when, alone.

    The clients take turns: whoever sends many texts at once, with whatever priorities, delays the others by one each turn.
    Of a client's texts the lowest priority number comes first, and among equals the oldest.
    """

    def __init__(self) -> None:
        self._clients: dict[Hashable, dict[int, deque[Item]]] = {}
        """Client -> priority -> its texts. The client whose turn it is stands first."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        for levels in self._clients.values():
            for waiting in levels.values():
                yield from waiting

    def put(self, item: Item, client: Hashable, priority: int) -> None:
        self._clients.setdefault(client, {}).setdefault(priority, deque()).append(item)
        self._size += 1

    def pop(self) -> Item:
        """Take the next text; there must be one."""
        client = next(iter(self._clients))
        levels = self._clients.pop(client)
        priority = min(levels)
        item = levels[priority].popleft()
        if not levels[priority]:
            del levels[priority]
        if levels:
            self._clients[client] = levels  # behind the others
        self._size -= 1
        return item

    def remove(self, item: Item) -> bool:
        """Take a text out. Returns whether it was there."""
        for client, levels in self._clients.items():
            for priority, waiting in levels.items():
                if item in waiting:
                    waiting.remove(item)
                    self._size -= 1
                    if not waiting:
                        del levels[priority]
                    if not levels:
                        del self._clients[client]
                    return True
        return False
