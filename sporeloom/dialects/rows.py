# SPDX-License-Identifier: Apache-2.0
"""A dialect as a table: each row has a foreign key, its field here, and how values are converted, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.dialects.settings import InputKeys


class NotExpressibleError(ValueError):
    """A value that cannot be expressed here; the message says why."""


def as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Row:
    """A foreign key, and the field of a training run's configuration that it corresponds to; or the fields, as a
    list."""

    key: str
    field: str | tuple[str, ...]
    read: Callable[[Any], Any] = as_it_is
    """Convert a foreign value to one here. Raises ValueError or TypeError for an invalid value,
    NotExpressibleError for one that has no meaning here."""
    write: Callable[[Any], Any] = as_it_is
    """Convert a value to the foreign one; None where there is none."""
    takes: str = "a number"
    """Description of the values that `read` accepts, for messages."""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,) if isinstance(self.field, str) else self.field


def number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(value)
    return value


def two(values: Any) -> Any:
    if not isinstance(values, list) or len(values) != 2:
        raise ValueError(values)
    return values


def betas(key: str) -> Row:
    """AdamW's beta1 and beta2, which other projects have as a list."""
    return Row(key, ("adam_beta1", "adam_beta2"), two, list, "two numbers")


def fill_defaults(
    book: InputKeys, train: dict[str, Any], key: str, place: str, defaults: Mapping[str, Any], whose: str
) -> None:
    """Put a foreign default that differs from the default here into `train`, and note it under `key`."""
    for field, value in defaults.items():
        if field not in train:
            train[field] = value
            book.add(key, place, "renamed", f"--{field.replace('_', '-')} {value}, {whose} default")


def read_rows(book: InputKeys, rows: Iterable[Row], train: dict[str, Any], flags: bool = False) -> None:
    """Put an input's values into `train`, and note them, as flags rather than fields where `flags` is set.

    Raises:
        ConfigError: a value that is none, or another one than `train` has already.
    """
    for row in rows:
        if not book.is_open(row.key):
            continue
        given = book.given[row.key]
        try:
            value = row.read(given.value)
        except NotExpressibleError as error:
            book.note(row.key, "not expressible", str(error))
            continue
        except (TypeError, ValueError):
            raise ConfigError(f"{given.place}: {row.key} must be {row.takes}, got {given.value!r}") from None
        found = dict(zip(row.fields, value, strict=True) if len(row.fields) > 1 else [(row.fields[0], value)])
        for field, ours in found.items():
            if train.setdefault(field, ours) != ours:
                flag = f"--{field.replace('_', '-')}"
                raise ConfigError(
                    f"{given.place}: {row.key} is {given.value}, but {flag} is {train[field]}; leave one out"
                )
        names = [f"--{field.replace('_', '-')}" if flags else field for field in row.fields]
        book.take(row.key, " and ".join(names))


def written_rows(rows: Iterable[Row], train: dict[str, Any]) -> dict[str, Any]:
    """Take the foreign keys and values out of `train`."""
    written = {}
    for row in rows:
        values = [train.get(field) for field in row.fields]
        if any(value is None for value in values):
            continue
        theirs = row.write(values if len(values) > 1 else values[0])
        if theirs is not None:
            written[row.key] = theirs
        for field in row.fields:
            del train[field]
    return written
