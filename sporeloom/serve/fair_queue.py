# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting texts get a row: by priority, and among equals the clients in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """A queue whose order depends on what was put in, and when, alone.

    The lowest priority number comes first. Among texts of one priority the clients take turns, and each client's come in the
    order of arrival: whoever sends many at once delays the others by one each turn.
    """

    def __init__(self) -> None:
        self._levels: dict[int, dict[Hashable, deque[Item]]] = {}
        """Priority -> client -> its texts. The client whose turn it is stands first."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        for level in self._levels.values():
            for waiting in level.values():
                yield from waiting

    def put(self, item: Item, client: Hashable, priority: int) -> None:
        self._levels.setdefault(priority, {}).setdefault(client, deque()).append(item)
        self._size += 1

    def pop(self) -> Item:
        """Take the next text; there must be one."""
        priority = min(self._levels)
        level = self._levels[priority]
        client = next(iter(level))
        waiting = level.pop(client)
        item = waiting.popleft()
        if waiting:
            level[client] = waiting  # behind the others
        elif not level:
            del self._levels[priority]
        self._size -= 1
        return item

    def remove(self, item: Item) -> bool:
        """Take a text out. Returns whether it was there."""
        for priority, level in self._levels.items():
            for client, waiting in level.items():
                if item in waiting:
                    waiting.remove(item)
                    self._size -= 1
                    if not waiting:
                        del level[client]
                    if not level:
                        del self._levels[priority]
                    return True
        return False
