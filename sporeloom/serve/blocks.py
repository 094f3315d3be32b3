# SPDX-License-Identifier: Apache-2.0
"""Answers as blocks of reasoning, text and calls, one after another: the form of the Responses and Messages APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sporeloom.inference.parsing import Delta
from sporeloom.serve.answers import Choice, deltas_of


@dataclass
class Block:
    """One block, which grows until the next one begins."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    """Its text; of a call the arguments as JSON."""
    id: str = ""
    """Id of a call."""
    name: str = ""
    """Name of the function that is called."""

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Arguments of a call; None where the answer ended within them."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


class Step(NamedTuple):
    """A change of the blocks. `delta` comes after `text` was added to its block."""

    phase: Literal["start", "delta", "end"]
    place: int
    block: Block
    text: str = ""
    is_last: bool = False
    """Whether the answer ends with this end of a block."""


class Blocks:
    """The blocks of one answer, built from its deltas."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def add(self, choice: Choice, text: str) -> Iterator[Step]:
        """Changes by new text of a choice, the last ones where it has ended."""
        yield from self._added(deltas_of(choice, text))
        if choice.finish_reason:
            yield from self._end(is_last=True)

    def _added(self, deltas: Sequence[Delta]) -> Iterator[Step]:
        for delta in deltas:
            yield from self._continue("reasoning", delta.get("reasoning_content") or "")
            yield from self._continue("text", delta.get("content") or "")
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    yield from self._begin(Block("call", id=call["id"], name=function["name"]))
                yield from self._grow(function["arguments"])

    def _end(self, is_last: bool = False) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Step("end", len(self.all) - 1, self.all[-1], is_last=is_last)

    def _continue(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Step]:
        if text and not (self._is_open and self.all[-1].kind == kind):
            yield from self._begin(Block(kind))
        yield from self._grow(text)

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._end()
        self.all.append(block)
        self._is_open = True
        yield Step("start", len(self.all) - 1, block)

    def _grow(self, text: str) -> Iterator[Step]:
        if text:
            self.all[-1].text += text
            yield Step("delta", len(self.all) - 1, self.all[-1], text)


def reasoning_tokens(choice: Choice) -> int:
    """Number of generated tokens up to the end of the reasoning, its markers included."""
    parser = choice.parser
    if parser is None or parser.form.reasoning is None:
        return 0
    markers, calls = parser.form.reasoning, parser.form.calls
    start, ends = markers.start.encode(), [markers.end.encode()]
    if calls and calls.ends_reasoning:
        ends.append(calls.markers.start.encode())
    text, overlap = bytearray(start if parser.began_in_reasoning else b""), max(map(len, ends)) - 1
    for count, token in enumerate(choice.completion.tokens, 1):
        new = choice.token_bytes(token)
        searched = max(0, len(text) - overlap)  # an end may have begun in the tokens before
        text += new if text else new.lstrip()
        if len(text) >= len(start) and not text.startswith(start):
            return 0
        if text.startswith(start) and any(text.find(end, searched) >= 0 for end in ends):
            return count
    return len(choice.completion.tokens) if text.startswith(start) else 0
