# SPDX-License-Identifier: Apache-2.0
"""Tokens between two answers of a conversation with tools: the end of the first, the tools' turn, the start of the second.

A chat template writes whole conversations. Of one with a stand-in for the answer, what follows the stand-in is what follows
any answer; so the tokens of an answer stay those that the model has sampled, whatever the template would make of its text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sporeloom.core.errors import ConfigError
from sporeloom.data.chat_template import TemplatedTokenizer
from sporeloom.data.special_tokens import Span, joined
from sporeloom.data.tokenizer import ChatMessage, Prompt, Tokenizer


class ToolResult(NamedTuple):
    """Output of a tool for a call."""

    call_id: str
    name: str
    text: str

    @property
    def message(self) -> ChatMessage:
        return ChatMessage("tool", self.text, {"tool_call_id": self.call_id, "name": self.name})


class ToolTurns:
    """Writes the turns of tools.

    Args:
        tools: functions in the form of OpenAI's API.
        variables: of the chat template, besides transformers' own.

    Raises:
        ConfigError: the tokenizer has no chat template, or its template has no tools or writes their turns otherwise.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Any], variables: Mapping[str, Any] | None = None):
        templated: Any = tokenizer  # of no template, too
        if not isinstance(templated, TemplatedTokenizer):
            kind = type(tokenizer).__name__
            raise ConfigError(
                f"--tools: {kind} has no chat template, which would say how tools and their results are written; give one "
                "with --chat-template"
            )
        self.tokenizer, self.tools, self.variables = templated, tools, variables
        path = templated.template.path
        if not templated.template.reads("tools"):
            raise ConfigError(
                f"--tools: {path} has no tools; give a template of a model that calls tools: --chat-template"
            )
        self._check()

    def follow(self, messages: Sequence[ChatMessage], last_token: int, results: Sequence[ToolResult]) -> Prompt:
        """Write what follows an answer to `messages` that ended with `last_token` and called tools: their results, up to
        where the next answer begins.

        Raises:
            ConfigError: the template does not take the conversation.
        """
        spans = self._following(messages, results)
        ids = self.tokenizer.encode_spans(spans)
        # The template closes the answer with the token at which the model has stopped.
        return Prompt(joined(spans), tuple(ids[1:] if ids[:1] == [last_token] else ids))

    def _following(self, messages: Sequence[ChatMessage], results: Sequence[ToolResult]) -> list[Span]:
        answer = hashlib.sha256(repr((messages, results)).encode(errors="replace")).hexdigest()
        talk = [*messages, ChatMessage("assistant", answer), *(result.message for result in results)]
        spans = self.tokenizer.chat(talk, True, self.variables, self.tools)
        places = [place for place, span in enumerate(spans) if answer in span.text]
        path = self.tokenizer.template.path
        if len(places) != 1 or joined(spans).count(answer) != 1:
            raise ConfigError(f"--tools: {path} does not write an answer once before the turn of a tool")
        place, found = places[0], spans[places[0]]
        rest = found.text[found.text.index(answer) + len(answer) :]
        following = [*([Span(rest, found.is_template)] if rest else []), *spans[place + 1 :]]
        return following

    def _check(self) -> None:
        """Check with an example that the template writes the turn of a tool, and likewise after an answer with a call."""
        question, result = ChatMessage("user", "6 * 7?"), ToolResult("call_0", "calculator", "It is 42.")
        text, path = joined(self._following([question], [result])), self.tokenizer.template.path
        if result.text not in text:
            raise ConfigError(f"--tools: {path} leaves out what tools say; give a template of a model that calls tools")
        function = {"name": result.name, "arguments": {"code": "6 * 7"}}
        calls = {"tool_calls": [{"id": result.call_id, "type": "function", "function": function}]}
        talk = [question, ChatMessage("assistant", "", calls), result.message]
        spans = self.tokenizer.chat(talk, True, self.variables, self.tools)
        if not joined(spans).endswith(text):
            raise ConfigError(
                f"--tools: {path} writes other text after a call than after an answer: {json.dumps(text)}"
            )
