# SPDX-License-Identifier: Apache-2.0
"""Constrained decoding: masks that let a model choose only what a grammar allows, computed by llguidance.

A mask depends on the grammar and the tokens of its own text, so that an answer depends on no other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from sporeloom.core.errors import ConfigError
from sporeloom.core.json_text import json_text
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.inference.sampling import GrammarError, History, Logits

MAX_MESSAGE = 300


class _Vocabulary:
    """A tokenizer as llguidance reads it: the bytes of all tokens, and a function that encodes plain text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]):
        self._tokenizer, self.eos_token_id = tokenizer, end_ids[0]
        special = {token: name for token, name in tokenizer.token_names.items() if token < tokenizer.vocab_size}
        special |= {token: special.get(token, f"<{token}>") for token in end_ids}
        self.special_token_ids = list(special)
        self.tokens = [
            # llguidance knows special tokens by this byte, which UTF-8 does not have.
            b"\xff" + special[token].encode() if token in special else tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        ]
        self._ids = {text: token for token, text in reversed([*enumerate(self.tokens)]) if token not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is encoded, not bytes")
        ids = self._tokenizer.encode_continuation(text)
        if b"".join(self.tokens[token] for token in ids) == text.encode():
            return ids
        return self._longest_first(text.encode())  # a tokenizer that normalizes its text

    def _longest_first(self, text: bytes) -> list[int]:
        ids, start = list[int](), 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                return ids  # llguidance continues from there by bytes
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


def vocabulary(tokenizer: Any, end_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary of a model, read once; `end_ids`: tokens that may follow a complete text."""
    return _vocabulary(tokenizer, tuple(token for token in end_ids if token < tokenizer.vocab_size))


@lru_cache(maxsize=16)
def _vocabulary(tokenizer: Any, end_ids: tuple[int, ...]) -> LLTokenizer:
    return LLTokenizer(
        TokenizerWrapper(_Vocabulary(tokenizer, end_ids)),
        n_vocab=tokenizer.vocab_size,
        eos_token=list(end_ids),
        slices=LLTokenizer.json_slices(),
    )


class TokenMask:
    """A processor of logits that keeps one text within grammars; each text has one of its own.

    Args:
        grammars: in llguidance's form; the first one may refer to the others by name.
        end_ids: tokens that may follow a complete text.

    Raises:
        ConfigError: a grammar is invalid, unsupported or satisfied by no text.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], grammars: Sequence[dict[str, Any]]):
        self._size, self._num_read = tokenizer.vocab_size, 0
        try:
            text = json_text({"grammars": list(grammars)})
        except RecursionError:
            raise ConfigError("it is nested too deeply") from None
        self._matcher = LLMatcher(vocabulary(tokenizer, end_ids), text, log_level=0)
        if not self._matcher.is_error():
            self._matcher.compute_bitmask()  # the slowest one, and here it delays no other text
        if self._matcher.is_error():
            raise ConfigError(_reason(self._matcher.get_error()))

    def __call__(self, logits: Logits, history: History) -> Logits:
        """Raises:
        GrammarError: the text has become too complex for the grammar's limits.
        """
        self._matcher.consume_tokens(list(history.generated[self._num_read :]))
        self._num_read = len(history.generated)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError
        logits[: self._size][np.unpackbits(bits, bitorder="little", count=self._size) == 0] = -np.inf
        return logits


def _reason(message: str) -> str:
    """An error of llguidance, for a client."""
    message = " ".join(message.partition("<state>")[0].split())
    if "NoExtension" in message:
        return "no text satisfies it"
    if message.startswith("Unimplemented keys: "):
        names = ", ".join(json.loads(message.removeprefix("Unimplemented keys: ")))
        return f"keywords that are not supported: {names}; leave them out and check the answer yourself"
    return message[:MAX_MESSAGE]
