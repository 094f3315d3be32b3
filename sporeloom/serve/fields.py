# SPDX-License-Identifier: Apache-2.0
"""Fields of a request's body: each of the type it must have, and errors that name it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sporeloom.core.lines import first_line


class RequestError(Exception):
    """A request that cannot be served. `param`: the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error in the form of OpenAI's API."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


@dataclass
class Fields:
    """The fields of a JSON object, each read once; null counts as absent."""

    values: dict[str, Any]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Read a field of this type, or return `default`.

        Raises:
            RequestError: it is of another type.
        """
        self.taken.add(name)
        value = self.values.get(name)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(
                {str: "a string", int: "an integer", float: "a number", bool: "true or false"}.get(
                    each, "a list" if each is list else "an object"
                )
                for each in kinds
                if each is not int or float not in kinds
            )
            raise RequestError(400, f"{name} must be {wanted}, got {shown(value)}", name)
        return text_of(value, name) if isinstance(value, str) else value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name, (int, float), default)
        if not low <= value <= high:  # nor NaN
            raise RequestError(400, f"{name} must be from {low:g} to {high:g}, got {shown(value)}", name)
        return float(value)

    def integer(self, name: str, low: int, high: int, default: int | None) -> Any:
        value = self.take(name, int, default)
        if value is not None and not low <= value <= high:
            raise RequestError(400, f"{name} must be from {low} to {high}, got {shown(value)}", name)
        return value

    def integers(self, name: str, high: int) -> tuple[int, ...]:
        return token_ids(self.take(name, list, []), name, high)

    def refuse(self, name: str, reason: str, *allowed: Any) -> None:
        """Refuse unsupported fields, unless they have no effect."""
        self.taken.add(name)
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise RequestError(400, f"{name}: {reason}", name)

    def unknown(self) -> list[str]:
        return [name for name in self.values if name not in self.taken]


def read_json(body: bytes) -> Fields:
    """Raises:
    RequestError: not a JSON object.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {first_line(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RequestError(400, f"the body must be a JSON object, got {shown(value)}")
    return Fields(value)


def token_ids(values: Sequence[Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """Read token ids.

    Raises:
        RequestError: something else.
    """
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise RequestError(400, f"{name}: {shown(value)} is not a token id below {vocab_size}", name)
    return tuple(values)


def text_of(value: Any, name: str) -> str:
    """Read a text that can be written as UTF-8.

    Raises:
        RequestError: something else.
    """
    if not isinstance(value, str):
        raise RequestError(400, f"{name} must be a string, got {shown(value)}", name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(400, f"{name} holds half a character (a lone surrogate)", name) from None
    return value


def shown(value: Any) -> str:
    """Format a value for a message: short, and without control characters."""
    text = ascii(value) if not isinstance(value, str) or not value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
