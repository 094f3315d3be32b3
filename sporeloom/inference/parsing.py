# SPDX-License-Identifier: Apache-2.0
"""Parse a chat model's answer as it grows: reasoning, content and tool calls, as OpenAI's deltas.

A complete message is the sum of its deltas, so that a stream and an answer in one piece agree, wherever the text was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from sporeloom.inference.formats import CallFormat, ChatFormat
from sporeloom.inference.stopping import StopCondition, held_back

Delta = dict[str, Any]
_HEAD = re.compile(r'[\s\[{},]*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*("|$)', re.DOTALL)


class MessageParser:
    """Parses one answer.

    Args:
        form: its markers; without `calls`, calls are text.
        in_reasoning: whether the prompt has opened the reasoning.
        new_id: the id of the call with this index.
        is_certain: whether all calls are valid, as a grammar enforces: arguments are passed on as they come. Otherwise a call
            waits for its end, because a malformed one is text.
        max_calls: further ones are dropped.
    """

    def __init__(
        self,
        form: ChatFormat,
        in_reasoning: bool,
        new_id: Callable[[int], str],
        is_certain: bool = False,
        max_calls: int | None = None,
    ):
        self.form, self.new_id, self.is_certain, self.max_calls = form, new_id, is_certain, max_calls
        self.began_in_reasoning = in_reasoning
        self.num_calls = 0
        """Number of complete calls so far."""
        self._text = ""  # not parsed yet
        self._fresh = in_reasoning  # white space at the start of a part is dropped
        self._space = ""  # before the call that is open
        self._depth: _Depth | None = None  # of the arguments that are passed on
        self._state = self._reasoning if in_reasoning else self._start if form.reasoning else self._content
        self._is_last = False

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, all of them complete."""
        return self.num_calls > 0 and self._state != self._certain_arguments

    def add(self, text: str) -> list[Delta]:
        """Add text. Returns what is certain now."""
        self._text += text
        deltas: list[Delta] = []
        while True:
            state, left = self._state, len(self._text)
            deltas += state()
            if self._state == state and len(self._text) == left:
                return deltas

    def end(self) -> list[Delta]:
        """Return what was withheld."""
        self._is_last = True
        return self.add("")

    # Each state takes text that it is sure of, and may set the next state.

    def _start(self) -> Iterator[Delta]:
        assert self.form.reasoning
        start, text = self.form.reasoning.start, self._text.lstrip()
        if text.startswith(start):
            self._text, self._state, self._fresh = text[len(start) :], self._reasoning, True
        elif self._is_last or not start.startswith(text):
            self._state = self._content
        yield from ()

    def _reasoning(self) -> Iterator[Delta]:
        assert self.form.reasoning
        calls = self.form.calls
        ends = [self.form.reasoning.end, *([calls.markers.start] if calls and calls.ends_reasoning else [])]
        place, found = min(((self._text.find(end), end) for end in ends if end in self._text), default=(-1, ""))
        text = self._take(place, ends)
        if text:
            yield {"reasoning_content": text}
        if found:
            is_marked = found == self.form.reasoning.end
            self._text = self._text.lstrip()[len(found) if is_marked else 0 :]
            self._state, self._fresh = self._content, True

    def _take(self, place: int, markers: list[str]) -> str:
        """Take text up to a place, or up to what may be the beginning of a marker; without space around it."""
        if self._fresh:
            stripped = self._text.lstrip()
            place -= len(self._text) - len(stripped) if place >= 0 else 0
            self._text = stripped
        if place < 0:
            place = len(self._text) - (0 if self._is_last else held_back(self._text, markers))
        text = self._text[:place].rstrip()
        self._text = self._text[len(text) :]
        self._fresh = self._fresh and not text
        return text

    def _content(self) -> Iterator[Delta]:
        if self._fresh:
            self._text = self._text.lstrip()
        if not self.form.calls:
            yield from self._say(self._text)
            self._text = ""
            return
        start = self.form.calls.markers.start
        place = self._text.find(start)
        text = self._take(place, [start])
        if place >= 0:
            self._space = self._text[: self._text.index(start)]
            self._text = self._text[len(self._space) + len(start) :]
            yield from self._say(text)
            self._state = self._certain_call if self.is_certain else self._call
            return
        if self._is_last:
            text, self._text = text + self._text, ""
        yield from self._say(text)

    def _say(self, text: str) -> Iterator[Delta]:
        if text:
            self._fresh = False
            yield {"content": text}

    def _call(self) -> Iterator[Delta]:
        assert self.form.calls
        start, end = self.form.calls.markers.start, self.form.calls.markers.end
        for found in re.finditer(re.escape(end), self._text):
            body = self._text[: found.start()]
            calls = read_calls(body, self.form.calls)
            if calls is None and _is_in_string(body):
                continue
            self._text, self._state = self._text[found.end() :], self._content
            if calls is None:
                yield from self._say(self._space + start + body + end)
            else:
                yield from self._report(calls)
            return
        if self._is_last:
            calls = read_calls(self._text, self.form.calls)  # the end of the text is that of the call
            if calls is None:
                yield from self._say(self._space + start + self._text)
            else:
                yield from self._report(calls)
            self._text, self._state = "", self._content

    def _report(self, calls: list[tuple[str, str]]) -> Iterator[Delta]:
        for name, arguments in calls:
            if self._is_full:
                break
            yield self._named(name)
            yield self._argued(arguments)
            self.num_calls += 1
        self._fresh = True

    def _certain_call(self) -> Iterator[Delta]:
        """Between the arguments of calls: names are passed on as soon as they are known."""
        assert self.form.calls
        end = self.form.calls.markers.end
        if head := _HEAD.match(self._text):
            self._text, self._state, self._depth = self._text[head.end() :], self._certain_arguments, _Depth()
            yield self._named(json.loads(head[1]))
        elif (place := self._text.find(end)) >= 0:
            self._text, self._state, self._fresh = self._text[place + len(end) :], self._content, True
        elif self._is_last:
            self._text = ""

    def _certain_arguments(self) -> Iterator[Delta]:
        assert self._depth
        length = self._depth.advance(self._text)
        arguments, self._text = self._text[:length], self._text[length:]
        if arguments:
            yield self._argued(arguments)
        if self._depth.is_closed:
            self.num_calls += 1
            self._state = self._certain_call

    @property
    def _is_full(self) -> bool:
        return self.max_calls is not None and self.num_calls >= self.max_calls

    def _named(self, name: str) -> Delta:
        index = self.num_calls
        function = {"name": name, "arguments": ""}
        return {"tool_calls": [{"index": index, "id": self.new_id(index), "type": "function", "function": function}]}

    def _argued(self, arguments: str) -> Delta:
        return {"tool_calls": [{"index": self.num_calls, "function": {"arguments": arguments}}]}


class _Depth:
    """Finds the end of a JSON object that is known to be valid, piece by piece."""

    def __init__(self) -> None:
        self._level, self._in_string, self._escaped = 0, False, False
        self.is_closed = False

    def advance(self, text: str) -> int:
        """Read on. Returns the number of characters that belong to the object."""
        for place, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
                continue
            self._in_string = character == '"'
            self._level += {"{": 1, "}": -1}.get(character, 0)
            if self._level == 0:
                self.is_closed = True
                return place + 1
        return len(text)


def read_calls(body: str, form: CallFormat) -> list[tuple[str, str]] | None:
    """Names of calls and their arguments as JSON texts; None: malformed."""
    try:
        value = _strict_json(body)
        given = value if form.is_list else [value]
        found, at = list[tuple[str, str]](), 0
        for call in given:
            name, arguments = call["name"], call["arguments"]
            if not isinstance(name, str) or not name or not isinstance(arguments, dict):
                return None
            name.encode()
            text, at = _raw_arguments(body, arguments, at)
            text.encode()
            found.append((name, text))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found or None


def _strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def _raw_arguments(body: str, arguments: dict[str, Any], at: int) -> tuple[str, int]:
    """The arguments of a call as the model has written them, searched from `at`, and their end: numbers keep their
    digits."""
    decoder = json.JSONDecoder()
    for found in _ARGUMENTS.finditer(body, at):
        try:
            value, end = decoder.raw_decode(body, found.end())
        except ValueError:
            continue
        if value == arguments:
            return body[found.end() : end], end
    raise ValueError("the name is written in another way")


def _is_in_string(text: str) -> bool:
    """Whether a JSON text ends within a string."""
    return any(not found[1] for found in _STRING.finditer(text))


def message_of(deltas: list[Delta]) -> dict[str, Any]:
    """The message that deltas add up to."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def after_first_call(form: ChatFormat, in_reasoning: bool) -> StopCondition:
    """Find the end after the first complete call."""
    assert form.calls
    marker = form.calls.markers.end
    end = re.compile(re.escape(marker))

    def ending(text: str, known: int = 0) -> int | None:
        for found in end.finditer(text, max(0, known - len(marker) + 1)):
            parser = MessageParser(form, in_reasoning, str)
            parser.add(text[: found.end()])
            if parser.num_calls:
                return found.end()
        return None

    return ending
