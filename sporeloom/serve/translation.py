# SPDX-License-Identifier: Apache-2.0
"""Translation of other APIs to OpenAI's chat: their fields become those of a chat request, and its errors name their
fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sporeloom.serve.fields import Fields, RequestError, shown, text_of


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields as their API does. `names`: by the names of a chat request."""
    try:
        yield
    except RequestError as error:
        if not names:
            raise
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        message = re.sub(rf"(?<![\w.])(?:{words})(?!\w)", lambda found: names[found[0]], error.message)
        message = re.sub(r"(tools\[\d+\])\.function\b", r"\1", message)
        param = names.get(error.param, error.param) if error.param else None
        raise RequestError(error.status, message, param, error.headers) from None


def chat_fields(fields: Fields, own: Mapping[str, Any]) -> Fields:
    """Fields of a chat request: those that were not read yet, which both APIs have or which are extensions, and `own`."""
    return Fields({**{name: fields.values[name] for name in fields.unknown()}, **own})


def refuse_foreign(fields: Fields, path: str, names: Mapping[str, str]) -> None:
    """Refuse fields of chat requests that this API has under another name, or not at all (an empty one).

    Raises:
        RequestError: there is one.
    """
    for name, own in names.items():
        fields.refuse(name, f"{path} does not have it" + (f"; send {own}" if own else ""))


def object_of(value: Any, place: str) -> dict[str, Any]:
    """Raises:
    RequestError: not an object.
    """
    if not isinstance(value, dict):
        raise RequestError(400, f"{place} must be an object, got {shown(value)}", param_of(place))
    return value


def joined_text(value: Any, place: str, kinds: tuple[str, ...]) -> str:
    """A text, or the texts of a list of parts of these kinds.

    Raises:
        RequestError: something else, as a picture.
    """
    if not isinstance(value, list):
        return text_of_param(value, place)
    texts = []
    for i, part in enumerate(value):
        kind = object_of(part, f"{place}[{i}]").get("type")
        if kind not in kinds:
            raise RequestError(
                400, f"{place}[{i}].type: only {' and '.join(kinds)}, got {shown(kind)}", param_of(place)
            )
        texts.append(text_of_param(part.get("text"), f"{place}[{i}].text"))
    return "".join(texts)


def text_of_param(value: Any, place: str) -> str:
    """A text; errors name the field of the request that it is part of."""
    try:
        return text_of(value, place)
    except RequestError as error:
        raise RequestError(error.status, error.message, param_of(place)) from None


def param_of(place: str) -> str:
    """The field of a request that a place within it belongs to."""
    return re.split(r"[.\[]", place, maxsplit=1)[0]


def add_call(turn: dict[str, Any], identity: Any, name: Any, arguments: Any) -> None:
    """Add a call to an assistant's message in the chat's form. `arguments`: a JSON text."""
    call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    turn.setdefault("tool_calls", []).append(call)
