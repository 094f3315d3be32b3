# SPDX-License-Identifier: Apache-2.0
"""The text of a growing list of tokens, in linear time: only what further tokens may change is decoded again."""

from __future__ import annotations

from sporeloom.data.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
"""The character that stands for an incomplete one at the end of a text."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, at most."""
MANY = 32
"""Tokens without a complete character at their end from which on a place to cut is searched among them."""


class GrowingText:
    """Equals `tokenizer.decode` of all tokens after each `add`.

    What a token adds may depend on the token before it, as at the beginning of a text, and on bytes of a character that are
    still to come. So the last tokens are decoded behind a few that are settled, whose text is then removed.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._prefix = list(tokenizer.prefix)
        self._first: list[int] = []
        self._settled, self._context = "", ""
        self._window: list[int] = []  # the tokens of `_context`, then those that are not settled
        self._num_context = 0
        self._tail = ""

    @property
    def text(self) -> str:
        return self._settled + self._tail

    @property
    def num_settled(self) -> int:
        """Number of characters that no further token changes."""
        return len(self._settled)

    def add(self, token: int) -> None:
        if len(self._first) < len(self._prefix):
            self._first.append(token)
        if self._context and not self._tail and not self._tokenizer.token_bytes(token):
            return
        self._window.append(token)
        decoded = self._tokenizer.decode(self._window)
        self._tail = decoded[len(self._context) :]
        if self._prefix and self._first == self._prefix[: len(self._first)]:
            return  # a complete text of its own, which tokenizers decode as a whole
        if self._tail and not decoded.endswith(UNFINISHED):
            self._settle(len(self._window))
        elif len(self._window) - self._num_context >= MANY:
            self._settle_part(decoded)

    def _settle(self, count: int) -> None:
        """Settle the first `count` tokens of the window, which end with a complete character: they are the next context."""
        text = self._tokenizer.decode(self._window[:count])[len(self._context) :]
        later = self._window[self._num_context : count]
        context = self._tokenizer.decode(later)
        if not context:
            return
        self._settled += text
        self._tail = self._tail[len(text) :]
        self._window, self._num_context, self._context = self._window[self._num_context :], len(later), context

    def _settle_part(self, decoded: str) -> None:
        """Settle tokens that no further one changes: those behind them have more bytes than a character, and both parts
        are decoded to what they are together."""
        for count in range(len(self._window) - LONGEST_CHARACTER, len(self._window) - 2 * LONGEST_CHARACTER, -1):
            before, after = self._window[:count], self._window[count:]
            has_bytes = all(self._tokenizer.token_bytes(token) for token in after)
            if has_bytes and self._tokenizer.decode(before) + self._tokenizer.decode(after) == decoded:
                self._settle(count)
                return
