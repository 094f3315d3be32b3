# SPDX-License-Identifier: Apache-2.0
"""The contents of a file of settings, with the lines of its keys for messages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import read_bytes

Keys = tuple[str | int, ...]
MAX_BYTES, LONGEST = 256 << 20, 100
_NAME = re.compile(r"[\w.,*|?/ -]+")


def show_key(keys: Keys) -> str:
    """`pipeline.stages[2]`"""
    return "".join(f"[{k}]" if isinstance(k, int) else f".{shown_key(k)}" for k in keys).removeprefix(".")


def shown_key(name: str) -> str:
    """Format a key for a message. One that cannot be a name is not shown: the file may be another one than was
    meant."""
    return shortened(name) if _NAME.fullmatch(name) else "(a key that is not a name)"


@dataclass
class Document:
    """The contents of a file, with the lines of its keys."""

    source: str
    """Name of the file, for messages."""
    value: Any
    lines: dict[Keys, int] = field(default_factory=dict, repr=False)
    """Line of each key and each entry of a list."""

    def at(self, keys: Keys = ()) -> str:
        """`file:line` of a key, or of the nearest key that the file has."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.source}:{self.lines[keys]}" if keys in self.lines else self.source

    @property
    def mapping(self) -> dict[str, Any]:
        """The full contents, which must be a mapping.

        Raises:
            ConfigError: it is not.
        """
        if not isinstance(self.value, dict):
            raise ConfigError(f"{self.source}: a mapping of keys is expected, got {kind_of(self.value)}")
        return self.value


def read_text(path: Path) -> str:
    """Read a UTF-8 file of settings.

    Raises:
        ConfigError: missing, unreadable, not a regular file, too long, or not UTF-8.
    """
    try:
        return read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{str(path)!r}: cannot be read: {error}") from None


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def kind_of(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")
