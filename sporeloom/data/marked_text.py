# SPDX-License-Identifier: Apache-2.0
"""Strings that record which of their characters a chat template wrote, through all operations of the template.

As values they are plain strings: every operation gives what it gives of `str`. Where it is not known where a character of a
result came from, it counts as not the template's: the name of a special token is then text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

_FIELD = re.compile(r"(%[%sd])")


class MarkedText(str):
    """Text of a template, of a message, or of both.

    Args:
        marks: a byte for each character, 1 for the template's own; None: none of them.
    """

    # No name without an underscore: templates can read all others.
    __slots__ = ("_marks",)
    _marks: bytes

    def __new__(cls, text: str, marks: bytes | None = None) -> MarkedText:
        made = super().__new__(cls, text)
        made._marks = bytes(len(made)) if marks is None else marks
        return made

    def __str__(self) -> str:
        return self  # templates convert everything they write; the marks stay

    def __getitem__(self, key: Any) -> str:
        marks = self._marks[key]
        return MarkedText(super().__getitem__(key), marks if isinstance(marks, bytes) else bytes([marks]))

    def __iter__(self) -> Iterator[str]:
        return (self[place] for place in range(len(self)))

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return concat((self, other))

    def __radd__(self, other: Any) -> Any:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        text = super().__mul__(count)
        return MarkedText(text, self._marks * count.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        text = super().__mod__(values)
        given = iter(values if isinstance(values, tuple) else (values,))
        parts: list[str] = []
        start = 0
        for found in _FIELD.finditer(self):
            parts.append(self[start : found.start()])
            parts.append(self[found.start()] if found[0] == "%%" else str(next(given, "")))
            start = found.end()
        return _known(text, [*parts, self[start:]])

    def join(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        text = super().join(parts)
        between = [piece for part in parts for piece in (self, part)][1:]
        return _known(text, between)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        text = super().replace(old, new, count)
        return _known(text, [MarkedText(new, marks_of(new)).join(self.split(old, count))] if old else [])

    def strip(self, chars: str | None = None) -> str:
        return self._from(len(self) - len(super().lstrip(chars)), super().strip(chars))

    def lstrip(self, chars: str | None = None) -> str:
        text = super().lstrip(chars)
        return self._from(len(self) - len(text), text)

    def rstrip(self, chars: str | None = None) -> str:
        return self._from(0, super().rstrip(chars))

    def removeprefix(self, prefix: str) -> str:
        text = super().removeprefix(prefix)
        return self._from(len(self) - len(text), text)

    def removesuffix(self, suffix: str) -> str:
        return self._from(0, super().removesuffix(suffix))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._pieces(super().splitlines(keepends=True), "")
        bare = super().splitlines()
        return whole if keepends else [line[: len(text)] for line, text in zip(whole, bare, strict=True)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, between, after = self._pieces(super().partition(sep), "")
        return before, between, after

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, between, after = self._pieces(super().rpartition(sep), "")
        return before, between, after

    def ljust(self, width: SupportsIndex, fill: str = " ") -> str:
        text = super().ljust(width, fill)
        return MarkedText(text, self._marks.ljust(len(text), b"\0"))

    def rjust(self, width: SupportsIndex, fill: str = " ") -> str:
        text = super().rjust(width, fill)
        return MarkedText(text, self._marks.rjust(len(text), b"\0"))

    def center(self, width: SupportsIndex, fill: str = " ") -> str:
        text = super().center(width, fill)
        return MarkedText(text, bytes(text.find(self)) + self._marks + bytes(len(text) - text.find(self) - len(self)))

    def upper(self) -> str:
        return self._cased(super().upper())

    def lower(self) -> str:
        return self._cased(super().lower())

    def title(self) -> str:
        return self._cased(super().title())

    def capitalize(self) -> str:
        return self._cased(super().capitalize())

    def swapcase(self) -> str:
        return self._cased(super().swapcase())

    def casefold(self) -> str:
        return self._cased(super().casefold())

    def _from(self, start: int, text: str) -> str:
        return MarkedText(text, self._marks[start : start + len(text)])

    def _cased(self, text: str) -> str:
        return MarkedText(text, self._marks if len(text) == len(self) else None)

    def _pieces(self, pieces: Iterable[str], between: str | None) -> list[str]:
        """Pieces of this text in order, separated by `between`; None: white space."""
        found = list[str]()
        at = 0
        for piece in pieces:
            at = self.index(piece, at) if between is None else at
            found.append(self._from(at, piece))
            at += len(piece) + len(between or "")
        return found


# Error messages of an expression in a template: to its author these are strings.
MarkedText.__module__, MarkedText.__name__ = "builtins", "str"


def marks_of(text: str) -> bytes:
    """Marks of any string."""
    return text._marks if isinstance(text, MarkedText) else bytes(len(text))


def concat(parts: Iterable[str]) -> str:
    """Concatenate strings."""
    parts = list(parts)
    return MarkedText("".join(parts), b"".join(map(marks_of, parts)))


def marked(value: Any, is_template: bool) -> Any:
    """A value as in JSON, with its strings marked; keys of objects are plain."""
    if isinstance(value, str):
        return MarkedText(value, (b"\1" if is_template else b"\0") * len(value))
    if isinstance(value, list):
        return [marked(item, is_template) for item in value]
    if isinstance(value, dict):
        return {key: marked(item, is_template) for key, item in value.items()}
    return value


def formatted(text: MarkedText, format_value: Callable[..., str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`text.format(...)`, as `format_value` does it, of fields that are `{}`, `{NUMBER}` or `{NAME}`."""
    value = format_value(*args, **kwargs)
    parts: list[str] = []
    start = count = 0
    for found in re.finditer(r"\{(\w*)\}", text):
        parts.append(text[start : found.start()])
        name = found[1] or str(count)
        count += not found[1]
        given = args[int(name)] if name.isdigit() and int(name) < len(args) else kwargs.get(name, "")
        parts.append(str(given))
        start = found.end()
    return _known(value, [*parts, text[start:]])


def _known(text: str, parts: list[str]) -> str:
    """`text` with the marks of `parts`, if these concatenate to it."""
    made = concat(parts)
    return made if made == text else text
