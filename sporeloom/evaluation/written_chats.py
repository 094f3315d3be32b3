# SPDX-License-Identifier: Apache-2.0
"""Tokens of conversations that the harness passes on as texts."""

from __future__ import annotations

from collections.abc import Sequence

from sporeloom.data.tokenizer import ChatMessage, Tokenizer, chat_prompt


class WrittenChats:
    """Stores the tokens of the conversations it writes: a text alone does not show which names of special tokens
    in it are the template's, and which belong to a message."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._lengths: set[int] = set()

    def write(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Raises:
            ConfigError: the tokenizer's model is a base model, or has another chat format.
        """
        text, tokens = chat_prompt(self.tokenizer, messages, add_generation_prompt)
        bare = text.rstrip()
        last = self.tokenizer.encode_continuation(text[len(bare) :])
        self._remember(text, tokens)
        if list(tokens[len(tokens) - len(last) :]) == last:  # the harness counts white space at its end to what follows
            self._remember(bare, tokens[: len(tokens) - len(last)])
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; one that continues a conversation begins with its tokens."""
        for length in sorted(self._lengths, reverse=True):
            if tokens := self._tokens.get(text[:length]):
                return [*tokens, *self.tokenizer.encode_continuation(text[length:])]
        return self.tokenizer.encode(text)

    def _remember(self, text: str, tokens: tuple[int, ...]) -> None:
        self._tokens[text] = tokens
        self._lengths.add(len(text))
