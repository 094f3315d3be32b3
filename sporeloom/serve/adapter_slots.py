# SPDX-License-Identifier: Apache-2.0
"""Slots of adapters in the running network: those of `--lora-modules`, then those reserved for adapters loaded at runtime.

Adapters are known by numbers that are never used again. A slot gets other weights only when no text computes with its last
ones: an answer has the weights that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sporeloom.checkpoint.adapters import Adapter, ranks_of_several
from sporeloom.core.errors import ConfigError

BUSY = "busy"
"""Outcome of a load for which no slot is free."""


class ModelGoneError(ConfigError):
    """The adapters of a request were unloaded before it was queued."""

    def __init__(self) -> None:
        super().__init__("the adapters of this model have been unloaded")


class _Model(Protocol):
    @property
    def tokenizer(self) -> Any: ...


@dataclass(eq=False)
class AdapterLoad:
    """Adapters to load, on the rank with the server."""

    number: int
    adapter: Adapter
    vocab_size: int
    notify: Callable[[str | None], None]
    """Called with the reason of a failure, or None."""
    slot: int = 0

    @property
    def command(self) -> dict[str, Any]:
        """The description of the load that every rank gets."""
        ranks = {path: widths[0] for path, widths in ranks_of_several([self.adapter]).items()}
        return {"number": self.number, "slot": self.slot, "vocab_size": self.vocab_size, "ranks": ranks}


class AdapterSlots:
    """Adapters by their slots; slot 0 is for none.

    Args:
        models: the checkpoint's model and those of `--lora-modules`, which stay.
        num_reserved: further slots.
    """

    def __init__(self, models: Sequence[_Model], num_reserved: int):
        self._fixed = len(models)
        self._slots = {number: number for number in range(self._fixed)}
        self._vocab_sizes = {number: model.tokenizer.vocab_size for number, model in enumerate(models)}
        self._reserved: dict[int, int | None] = dict.fromkeys(range(self._fixed, self._fixed + num_reserved))
        self._retired: set[int] = set()

    def slot_of(self, number: int) -> int | None:
        """Slot of adapters; None: it holds others now."""
        return self._slots.get(number)

    def vocab_size(self, number: int) -> int:
        return self._vocab_sizes[number]

    def take(self, number: int, used: Collection[int]) -> int | None:
        """Choose a slot for adapters: an empty one, or one whose adapters are unloaded and not `used` by any text; None if
        there is no such slot."""
        for slot, last in self._reserved.items():
            if last is None or (last in self._retired and last not in used):
                self.put(number, slot, 0)
                return slot
        return None

    def put(self, number: int, slot: int, vocab_size: int) -> None:
        """Assign a slot to adapters, in place of its last ones."""
        last = self._reserved[slot]
        if last is not None and last != number:
            self._retired.discard(last)
            del self._slots[last], self._vocab_sizes[last]
        self._reserved[slot], self._slots[number], self._vocab_sizes[number] = number, slot, vocab_size

    def retire(self, number: int) -> None:
        """Note that adapters are unloaded: their slot is free once no text uses it."""
        if self.slot_of(number) is not None and number >= self._fixed:
            self._retired.add(number)
