# SPDX-License-Identifier: Apache-2.0
"""Special tokens in a text: where their names become these tokens, and where they are ordinary text.

A prompt is a sequence of spans. In a template's own text the name of a special token is that token; in what somebody said it
is text, so that nobody can open a turn by writing its token. Between two special tokens the text is tokenized as a whole,
wherever its spans end: as the text of a rendered template is.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from sporeloom.data.chat_template import ChatTemplate


class Span(NamedTuple):
    """A piece of a prompt."""

    text: str
    is_template: bool
    """Whether names of special tokens in it become these tokens."""


def template(text: str) -> Span:
    """Text that a format or template writes."""
    return Span(text, True)


def content(text: str) -> Span:
    """Text of a message, file or tool."""
    return Span(text, False)


def joined(spans: Sequence[Span]) -> str:
    """The text of spans."""
    return "".join(span.text for span in spans)


class SpecialTokens(ABC):
    """Base of tokenizers with special tokens. Subclasses encode plain text."""

    prefix: Sequence[int] = ()
    """Tokens that every text begins with."""
    special: Mapping[str, int] = {}
    """Name of a special token -> its id, where a prompt may name it."""
    chat: Callable[..., list[Span]] | None = None
    """For a chat model: the prompt of `(messages, add_generation_prompt)`; subclasses define it as a method."""
    infill: Callable[..., list[Span]] | None = None
    """For a model that was trained to fill in the middle: the prompt of `(before, after)`; defined in the same way."""
    template: ChatTemplate | None = None
    """The chat template; None where the form of a chat is built in, or there is none."""
    benchmark_form: Literal["chat"] | None = None
    """Prompt form of HumanEval-X for the model; default: that of its family."""

    @property
    def template_tokens(self) -> Mapping[str, int]:
        """Names that a chat template may write."""
        return self.special

    @abstractmethod
    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text at the start of a text or after a special token, without the prefix."""

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of plain text that continues other text: the tokens that a model has to generate for it."""
        return self.encode_text(text)

    def encode(self, text: str) -> list[int]:
        """Token ids; names of special tokens in the text become these tokens."""
        return [*self.prefix, *self.encode_spans([template(text)])]

    def encode_document(self, text: str) -> list[int]:
        """Token ids of a text of a corpus, in which the name of a special token is text."""
        return [*self.prefix, *self.encode_text(text)]

    def encode_prompt(self, spans: Sequence[Span]) -> list[int]:
        """Token ids of a conversation, or of another form of prompt."""
        return [*self.prefix, *self.encode_spans(spans)]

    def encode_spans(self, spans: Sequence[Span]) -> list[int]:
        """Token ids of spans, without the prefix."""
        ids: list[int] = []
        waiting = ""  # plain text since the last special token
        # A name counts that is in template text alone, which may be written by several spans.
        for text, is_template in _merged(spans):
            parts = self._names.split(text) if is_template and self._names else [text]
            for place, part in enumerate(parts):  # texts and names by turns
                if place % 2 == 0:
                    waiting += part
                    continue
                ids += [*(self.encode_text(waiting) if waiting else ()), self.special[part]]
                waiting = ""
        return ids + self.encode_text(waiting) if waiting else ids

    @property
    def token_names(self) -> dict[int, str]:
        """Names of the special tokens, for messages."""
        return {i: name for name, i in self.special.items()}

    @cached_property
    def _names(self) -> re.Pattern[str] | None:
        names = sorted(self.special, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].is_template == span.is_template:
            merged[-1] = Span(merged[-1].text + span.text, span.is_template)
        elif span.text:
            merged.append(span)
    return merged
