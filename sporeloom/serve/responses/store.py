# SPDX-License-Identifier: Apache-2.0
"""Responses that later requests may continue from, in memory, up to a number of bytes."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from sporeloom.core.json_text import json_text
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.serve.fields import RequestError, shown


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to its end."""

    body: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    """Without instructions, which each request gives anew."""
    client: int = 0
    """Number of the key of the client that may see it."""


class _Kept(NamedTuple):
    """A response as JSON, whose size in memory is known."""

    client: int
    body: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.messages)


class ResponseStore:
    """Keeps the responses used last, on this server only, until it ends. Used by several threads.

    Args:
        max_bytes: of responses and conversations together; further ones replace those used least recently.
    """

    def __init__(self, max_bytes: int):
        self._max, self._bytes = max_bytes, 0
        self._found: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._max > 0

    def put(self, response: StoredResponse) -> None:
        """Keep a response, unless it is larger than all that may be kept."""
        messages = [[message.role, message.content, message.more] for message in response.messages]
        kept = _Kept(response.client, json_text(response.body).encode(), json_text(messages).encode())
        if kept.size > self._max:
            return
        with self._lock:
            self._found[response.body["id"]] = kept
            self._bytes += kept.size
            while self._bytes > self._max:
                self._bytes -= self._found.popitem(last=False)[1].size

    def get(self, name: str, client: int = 0, param: str | None = None) -> StoredResponse:
        """Raises:
        RequestError: it was never stored for this client, deleted, or replaced by newer ones.
        """
        with self._lock:
            kept = self._of(name, client, param)
            self._found.move_to_end(name)
        messages = tuple(ChatMessage(*message) for message in json.loads(kept.messages))
        return StoredResponse(json.loads(kept.body), messages, kept.client)

    def delete(self, name: str, client: int = 0) -> None:
        """Raises:
        RequestError: the client has none of this name.
        """
        with self._lock:
            self._bytes -= self._of(name, client).size
            del self._found[name]

    def _of(self, name: str, client: int, param: str | None = None) -> _Kept:
        kept = self._found.get(name)
        if kept is None or kept.client != client:  # another client's does not exist
            raise RequestError(404, f"there is no response {shown(name)} here, or no longer", param)
        return kept
