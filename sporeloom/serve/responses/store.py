# SPDX-License-Identifier: Apache-2.0
"""Responses that later requests may continue from, in memory, up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from sporeloom.core.json_text import json_text
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.serve.fields import RequestError, shown


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to its end."""

    body: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    """Without instructions, which each request gives anew."""


class ResponseStore:
    """Keeps the responses used last, on this server only, until it ends. Used by several threads.

    Args:
        max_bytes: of responses and conversations together; further ones replace those used least recently.
    """

    def __init__(self, max_bytes: int):
        self._max, self._bytes = max_bytes, 0
        self._found: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._max > 0

    def put(self, response: StoredResponse) -> None:
        """Keep a response, unless it is larger than all that may be kept."""
        size = len(json_text(response.body)) + sum(
            len(json_text([message.role, message.content, message.more])) for message in response.messages
        )
        if size > self._max:
            return
        with self._lock:
            self._found[response.body["id"]] = response, size
            self._bytes += size
            while self._bytes > self._max:
                _, (_, freed) = self._found.popitem(last=False)
                self._bytes -= freed

    def get(self, name: str, param: str | None = None) -> StoredResponse:
        """Raises:
        RequestError: it was never stored, deleted, or replaced by newer ones.
        """
        with self._lock:
            if name not in self._found:
                raise RequestError(404, f"there is no response {shown(name)} here, or no longer", param)
            self._found.move_to_end(name)
            return self._found[name][0]

    def delete(self, name: str) -> None:
        """Raises:
        RequestError: there is none of this name.
        """
        self.get(name)
        with self._lock:
            _, size = self._found.pop(name, (None, 0))
            self._bytes -= size
