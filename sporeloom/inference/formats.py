# SPDX-License-Identifier: Apache-2.0
"""Formats of a chat model's answers: the markers around its reasoning and its tool calls, and the tokens they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Markers:
    """Texts around a part of an answer."""

    start: str
    end: str


@dataclass(frozen=True)
class CallFormat:
    """Tool calls as JSON objects with `name` and `arguments`."""

    markers: Markers
    is_list: bool
    """Whether a pair of markers holds a list of calls; otherwise one call."""
    ends_reasoning: bool
    """Whether a call may begin before the end of the reasoning was marked."""
    space: str = ""
    """White space between a marker and the JSON."""


CALLS = {
    "hermes": CallFormat(Markers("<tool_call>", "</tool_call>"), is_list=False, ends_reasoning=False, space="\n"),
    "openpangu": CallFormat(Markers("[unused11]", "[unused12]"), is_list=True, ends_reasoning=True),
    "openpangu2": CallFormat(Markers("<|tool_call_start|>", "<|tool_call_end|>"), is_list=True, ends_reasoning=True),
}
"""Formats by the values of --tool-call-parser."""
REASONING = {"think": Markers("<think>", "</think>"), "openpangu": Markers("[unused16]", "[unused17]")}
"""Markers by the values of --reasoning-parser."""
THINKING = ("enable_thinking", "thinking", "think")
"""Variables by which chat templates switch reasoning on and off."""
_OTHER_CALLS = ("<function=", "<arg_key>")
"""Texts in templates that have the markers of `hermes` around something else than JSON."""


@dataclass(frozen=True)
class ChatFormat:
    """Format of a model's answers; None: it has no such part."""

    reasoning: Markers | None = None
    calls: CallFormat | None = None


PLAIN = ChatFormat()


def chat_format(tokenizer: Tokenizer, calls: str = "auto", reasoning: str = "auto") -> ChatFormat:
    """Find the format of a model's answers: the named one, or with `auto` that of its chat template and special
    tokens.

    Raises:
        ConfigError: there is no format of this name.
    """
    problems = [
        f"{flag} {name}: one of auto, none, {', '.join(known)}"
        for flag, name, known in (
            ("--tool-call-parser", calls, CALLS),
            ("--reasoning-parser", reasoning, REASONING),
        )
        if name not in ("auto", "none", *known)
    ]
    if problems:
        raise ConfigError(problems)
    if tokenizer.chat is None:
        return PLAIN
    return ChatFormat(
        REASONING.get(_own_reasoning(tokenizer) if reasoning == "auto" else reasoning),
        CALLS.get(_own_calls(tokenizer) if calls == "auto" else calls),
    )


def _own_calls(tokenizer: Tokenizer) -> str:
    text = template_text(tokenizer)
    if "[unused9]" in text and {"[unused11]", "[unused12]"} <= set(tokenizer.token_names.values()):
        return "openpangu"
    if "<|tool_call_start|>" in text and "<|message_start|>" in text:
        return "openpangu2"
    is_hermes = "<tool_call>" in text and not any(sign in text for sign in _OTHER_CALLS)
    return "hermes" if is_hermes else "none"


def _own_reasoning(tokenizer: Tokenizer) -> str:
    if {"[unused9]", "[unused16]", "[unused17]"} <= set(tokenizer.token_names.values()):
        return "openpangu"
    return "think" if REASONING["think"].end in template_text(tokenizer) else "none"


def template_text(tokenizer: Tokenizer) -> str:
    """Text of a tokenizer's chat template; empty where its form is built in."""
    template = tokenizer.template
    return "" if template is None else template.text


def thinking_variable(tokenizer: Tokenizer) -> str | None:
    """The variable by which a tokenizer's chat template switches reasoning on and off, if it has one."""
    template = tokenizer.template
    return next((name for name in THINKING if template is not None and template.reads(name)), None)


class MarkedTokenizer:
    """A tokenizer that decodes some special tokens to their names, which are otherwise left out.

    Args:
        names: of special tokens; others have no effect.
    """

    def __init__(self, tokenizer: Tokenizer, names: Sequence[str]):
        self._tokenizer = tokenizer
        ids = {name: token for token, name in tokenizer.token_names.items()}
        self.shown = {ids[name]: name for name in names if name in ids}
        """Tokens that are decoded to these names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int]) -> str:
        if not self.shown:
            return self._tokenizer.decode(ids)
        text, start = "", 0
        for place, token in enumerate(ids):
            if token in self.shown:
                text += (self._tokenizer.decode(ids[start:place]) if place > start else "") + self.shown[token]
                start = place + 1
        return text + self._tokenizer.decode(ids[start:]) if start < len(ids) else text

    def token_bytes(self, token: int) -> bytes:
        return self.shown[token].encode() if token in self.shown else self._tokenizer.token_bytes(token)
