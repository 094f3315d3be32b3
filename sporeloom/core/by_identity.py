# SPDX-License-Identifier: Apache-2.0
"""Values that belong to objects of other packages, which need not be given further attributes for them."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class ByIdentity(Generic[Key, Value]):
    """A value for each of some objects, by their identity: they need be neither hashable nor comparable. An entry ends with
    its object."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Key], Value]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def set(self, key: Key, value: Value) -> None:
        number = id(key)
        self._entries[number] = weakref.ref(key, lambda _: self._entries.pop(number, None)), value

    def remove(self, key: Key) -> None:
        """Forget the value of an object, if it has one."""
        self._entries.pop(id(key), None)
