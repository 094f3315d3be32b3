# SPDX-License-Identifier: Apache-2.0
"""The settings that every dialect is read into and written from, and notes on the translation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from sporeloom.core.errors import did_you_mean
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import size_config
from sporeloom.strategy.config import Strategy

Fate = Literal["same", "renamed", "approximated", "no effect", "not expressible", "unknown"]
LOSSES: tuple[Fate, ...] = ("approximated", "not expressible", "unknown")


@dataclass(frozen=True)
class Note:
    """Translation of one key."""

    key: str
    place: str
    """file:line, or the name of the dialect that is written."""
    fate: Fate
    text: str = ""
    """The new name, or the reason."""

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.fate}{': ' if self.text else ''}{self.text}"


@dataclass(frozen=True)
class Settings:
    """A strategy, with further settings of a training run."""

    strategy: Strategy
    train: dict[str, Any] = field(default_factory=dict)
    """Fields of tools/train.py's configuration."""
    num_layers: int | None = None
    """Number of layers of the model, where it is known: some dialects count layers from it."""
    model: ModelConfig | None = None
    """Model configuration, where its family has no such size."""

    @property
    def network(self) -> tuple[str, ModelConfig] | None:
        """Family and configuration of the model, where they are known."""
        family, size = self.train.get("model"), self.train.get("size")
        model = self.model or (size_config(family, size) if family and size else None)
        return (family, model) if family and model else None

    @property
    def microbatches(self) -> int:
        """Number of parts that a data-parallel rank's sequences of one step are split into, by a pipeline or by
        accumulation."""
        pipeline = self.strategy.mesh.pp > 1
        return self.strategy.pipeline.num_microbatches if pipeline else int(self.train.get("accumulate", 1))

    @property
    def micro_batch_size(self) -> int | None:
        """Sequences of one microbatch on one rank; None without a batch size that can be split so."""
        parts = self.microbatches * self.strategy.mesh.dp
        batch_size = self.train.get("batch_size")
        return batch_size // parts if batch_size and batch_size % parts == 0 else None


class LossNotes:
    """Notes on settings that the written dialect cannot express."""

    def __init__(self, dialect: str):
        self.dialect, self.notes = dialect, list[Note]()

    def __call__(self, key: str, why: str, fate: Fate = "not expressible") -> None:
        self.notes.append(Note(key, self.dialect, fate, why))

    def rest(self, train: dict[str, Any]) -> None:
        """Note flags that were not written."""
        for name, value in train.items():
            if value not in (None, False, (), []):
                self(name, f"{value}: no key for it")


@dataclass(frozen=True)
class GivenValue:
    """A value somebody wrote."""

    value: Any
    place: str


class InputKeys:
    """The keys of an input, each read once; those that nobody reads are reported as unknown."""

    def __init__(self, given: dict[str, GivenValue]):
        self.given = given
        self.notes: list[Note] = []
        self._open = dict(given)

    def __contains__(self, key: str) -> bool:
        return key in self.given

    def peek(self, key: str, default: Any = None) -> Any:
        return self.given[key].value if key in self.given else default

    def refused(self, strict: dict[str, tuple[str, ...]], dialect: str) -> list[str]:
        """Report keys that a section does not have; `strict`: all keys of the sections in which the dialect
        refuses others."""
        return [
            f"{given.place}: {key} is not a key of {dialect}{did_you_mean(name, strict[section])}"
            for key, given in self.given.items()
            for section, _, name in [key.partition(".")]
            if section in strict and name.partition(".")[0] not in strict[section] and (name or given.value)
        ]

    def is_open(self, key: str) -> bool:
        """Whether nobody has read it yet."""
        return key in self._open

    def note(self, key: str, fate: Fate, text: str = "") -> None:
        """Note the translation of a key that was given."""
        if key in self._open:
            self.notes.append(Note(key, self._open.pop(key).place, fate, text))

    def add(self, key: str, place: str, fate: Fate, text: str) -> None:
        """Note the effect of a key that is missing."""
        self.notes.append(Note(key, place, fate, text))

    def renote(self, key: str, fate: Fate, text: str) -> None:
        """Change the note of a key, after another one was read."""
        self.notes = [Note(key, note.place, fate, text) if note.key == key else note for note in self.notes]

    def fill(self, key: str, given: GivenValue) -> None:
        """Read a key as `given`, which replaces a value that its file leaves open."""
        self.given[key] = self._open[key] = given

    def take(self, key: str, name: str, default: Any = None) -> Any:
        """The value of a key that is called `name` here."""
        self.note(key, "same" if key.rpartition(".")[2] == name.rpartition(".")[2] else "renamed", name)
        return self.peek(key, default)

    def only(self, allowed: Iterable[tuple[str, Any, str]]) -> None:
        """Note keys that can have one value here, with the reason."""
        for key, value, why in allowed:
            if key in self.given:
                same = self.peek(key) == value
                self.note(key, "same" if same else "not expressible", "" if same else f"{self.peek(key)!r}: {why}")

    def without_effect(self, keys: dict[str, str]) -> None:
        """Note keys, or full sections (`name.*`), that have no effect here, with the reason."""
        for pattern, why in keys.items():
            prefix = pattern.removesuffix("*")
            for key in [k for k in self._open if k == pattern or (pattern != prefix and k.startswith(prefix))]:
                self.note(key, "no effect", why)

    def finish(self, known: Iterable[str] = (), explain: Callable[[str], str] = lambda key: "") -> list[Note]:
        """All notes, in the order of the input."""
        for key in list(self._open):
            hint = explain(key) or f"no such key{did_you_mean(key, known)}"
            self.note(key, "unknown", hint)
        order = {key: number for number, key in enumerate(self.given)}
        return sorted(self.notes, key=lambda note: order.get(note.key, len(order)))
