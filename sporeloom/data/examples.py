# SPDX-License-Identifier: Apache-2.0
"""Examples for tuning: conversations, prompts with completions, preferences; and prompts alone.

JSON lines, one object each. Columns are named as TRL names them:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"prompt": ..., "completion": ...}
    {"prompt": ..., "chosen": ..., "rejected": ..., "margin": 1.0}
    {"prompt": ..., ANYTHING ELSE, handed to functions that reward}

A prompt, completion, chosen and rejected are texts, or messages, which are written as the model's chat template says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sporeloom.core.document import shown_key
from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import split_lines
from sporeloom.core.reader import parse_json
from sporeloom.data.batch import Batch
from sporeloom.data.documents import decode_text
from sporeloom.data.packing import best_fit
from sporeloom.data.tokenizer import ChatMessage, Prompt, Tokenizer, chat_prompt, text_prompt
from sporeloom.models.config import NO_LABEL

ROLES = ("system", "user", "assistant")
MAX_PROBLEMS = 5


class Line(NamedTuple):
    """An object of a file."""

    place: str
    values: dict[str, Any]


class Example(NamedTuple):
    """Tokens of one text, and which of them are trained on."""

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]


class Pair(NamedTuple):
    """Two texts, the first of which is preferred."""

    chosen: Example
    rejected: Example
    margin: float


class PromptLine(NamedTuple):
    """A prompt to sample texts for."""

    tokens: tuple[int, ...]
    text: str
    columns: dict[str, Any]
    """All fields of the line."""


def read_lines(path: Path, wanted: Sequence[Sequence[str]]) -> list[Line]:
    """Read the objects of a file of JSON lines.

    `wanted`: alternative sets of keys; each object has one completely.

    Raises:
        ConfigError: missing, not UTF-8, no JSON, lines without these keys; the first few are named.
    """
    lines, problems = list[Line](), list[str]()
    for number, text in enumerate(split_lines(decode_text(path)), 1):
        if not text.strip():
            continue
        place = f"{path}:{number}"
        try:
            values = parse_json(text.encode(), place)
        except ConfigError as error:
            problems += error.problems
            continue
        if not isinstance(values, dict) or not any(all(key in values for key in keys) for keys in wanted):
            found = (
                f"has {', '.join(map(shown_key, values)) or 'no keys'}"
                if isinstance(values, dict)
                else "is not an object"
            )
            problems.append(f"{place}: {found}; expected: {' or '.join(', '.join(keys) for keys in wanted)}")
            continue
        lines.append(Line(place, values))
    if not lines and not problems:
        problems = [f"{path}: contains no lines"]
    if problems:
        raise ConfigError(shortened(path, problems))
    return lines


class LineTokenizer:
    """Tokenizes lines as generation does.

    Args:
        learn_all: not only what an assistant says, but everything is to be learned.
        stop_ids: tokens at which generation stops, besides the end of documents.
        variables: of the chat template, besides transformers' own.
        tools: functions that the prompts offer, in the form of OpenAI's API; prompts are then messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        learn_all: bool = False,
        stop_ids: Sequence[int] = (),
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Any] = (),
    ):
        self.tokenizer, self.learn_all, self.variables, self.tools = tokenizer, learn_all, variables, tools
        self.stop_ids = {tokenizer.eod_id, *stop_ids}

    def examples(self, lines: Sequence[Line]) -> list[Example]:
        """Examples of `messages`, or of `prompt` and `completion`. A conversation whose later prompts have an
        earlier answer in other tokens than those it was given in makes several, one for each such answer.

        Raises:
            ConfigError: lines that cannot be read so.
        """
        return [example for found in self._each(lines, self._example) for example in found]

    def pairs(self, lines: Sequence[Line]) -> list[Pair]:
        """Pairs of `prompt`, `chosen` and `rejected`; messages of both may begin with the prompt instead.

        Raises:
            ConfigError: lines that cannot be read so.
        """
        return self._each(lines, self._pair)

    def prompts(self, lines: Sequence[Line]) -> list[PromptLine]:
        """Prompts of `prompt`.

        Raises:
            ConfigError: lines that cannot be read so.
        """
        return self._each(lines, self._prompt)

    def _each(self, lines: Sequence[Line], read: Callable[[Line], Any]) -> list[Any]:
        with_messages = [line for line in lines if any(isinstance(value, list) for value in _texts(line))]
        if with_messages and self.tokenizer.chat is None:
            raise ConfigError(
                f"{with_messages[0].place}: messages, but the model has no chat template: give one with --chat-template, as "
                "examples/assistant/chat_template.jinja is"
            )
        found, problems = list[Any](), list[str]()
        for line in lines:
            try:
                found.append(read(line))
            except ConfigError as error:
                problems += [p if p.startswith(line.place) else f"{line.place}: {p}" for p in error.problems]
        if problems:
            raise ConfigError(shortened(Path(lines[0].place.rpartition(":")[0]), problems))
        return found

    def _example(self, line: Line) -> list[Example]:
        values = line.values
        if "messages" in values:
            return self._conversation(_messages(values["messages"], f"{line.place}: messages"))
        prompt, completion = values["prompt"], values["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [self._completed(prompt, completion)]
        before, after = _both_messages(prompt, completion, line.place, "completion")
        return self._conversation([*before, *after], len(before))

    def _pair(self, line: Line) -> Pair:
        values = line.values
        margin = values.get("margin", 0.0)
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            raise ConfigError(f"{line.place}: margin must be a number, got {margin!r}")
        if "prompt" not in values:
            talks = [_messages(values[key], f"{line.place}: {key}") for key in ("chosen", "rejected")]
            both = [self._answered(talk) for talk in talks]
        else:
            both = [
                self._pair_example(values["prompt"], values[key], line.place, key) for key in ("chosen", "rejected")
            ]
        return Pair(both[0], both[1], float(margin))

    def _pair_example(self, prompt: Any, completion: Any, place: str, name: str) -> Example:
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._completed(prompt, completion)
        before, after = _both_messages(prompt, completion, place, name)
        found = self._conversation([*before, *after], len(before))
        if len(found) > 1:
            raise ConfigError(f"{place}: {name}: the chat template changes earlier answers; give one answer")
        return found[0]

    def _prompt(self, line: Line) -> PromptLine:
        given = line.values["prompt"]
        if isinstance(given, str) and self.tools:
            raise ConfigError(
                f"{line.place}: prompt is a text, which offers no tools; give a list of messages, or leave --tools out"
            )
        if isinstance(given, str):
            prompt = text_prompt(self.tokenizer, given)
        else:
            prompt = self._chat_prompt(_messages(given, f"{line.place}: prompt"))
        if not prompt.tokens:
            raise ConfigError(f"{line.place}: an empty prompt")
        return PromptLine(prompt.tokens, prompt.text, line.values)

    def _chat_prompt(self, messages: Sequence[ChatMessage], is_open: bool = True) -> Prompt:
        return chat_prompt(self.tokenizer, messages, is_open, self.variables, self.tools)

    def _completed(self, prompt: str, completion: str) -> Example:
        """Tokenize a prompt that is a text, and its completion."""
        before = self.tokenizer.encode(prompt)
        return self._example_of(before, [*self.tokenizer.encode_continuation(completion), self.tokenizer.eod_id])

    def _answered(self, messages: Sequence[ChatMessage]) -> Example:
        """Tokenize the last answer of a conversation, after the prompt that it answers."""
        _check_ends(messages)
        answer = self.tokenizer.encode_continuation(messages[-1].content)
        before = self._chat_prompt(messages[:-1]).tokens
        return self._example_of(before, [*answer, self._stop(messages, [*before, *answer])])

    def _conversation(self, messages: Sequence[ChatMessage], first: int = 0) -> list[Example]:
        """Tokenize all answers of a conversation from its message `first` on: one example with those that stand in
        the last prompt as they were given, and one for each that does not."""
        _check_ends(messages)
        whole = self._answered(messages)
        learned, others = list(whole.learned), list[Example]()
        for place in range(first, len(messages) - 1):
            if messages[place].role != "assistant" or self.learn_all:
                continue
            alone = self._answered(messages[: place + 1])
            end = len(alone.tokens) - 1
            if whole.tokens[:end] != alone.tokens[:end]:
                others.append(alone)
                continue
            start = alone.learned.index(True)
            # The rest is the template's; it is trained on where generation would stop at it.
            stops = whole.tokens[end] in self.stop_ids
            learned[start : end + stops] = [True] * (end + stops - start)
        return [*others, whole._replace(learned=tuple(learned))]

    def _stop(self, messages: Sequence[ChatMessage], tokens: list[int]) -> int:
        """Find where an answer stops: at the token that the template writes after it, if generation stops there."""
        try:
            closed = self._chat_prompt(messages, is_open=False).tokens
        except ConfigError:  # it refuses a conversation that ends with an answer
            closed = ()
        follows = closed[len(tokens) :][:1] if list(closed[: len(tokens)]) == tokens else ()
        return follows[0] if follows and follows[0] in self.stop_ids else self.tokenizer.eod_id

    def _example_of(self, before: Sequence[int], learned: Sequence[int]) -> Example:
        mask = (self.learn_all,) * len(before) + (True,) * len(learned)
        return Example((*before, *learned), mask)


def _check_ends(messages: Sequence[ChatMessage]) -> None:
    if messages[-1].role != "assistant":
        raise ConfigError(f"the last message is from {messages[-1].role}; it must be the assistant's")


def _both_messages(prompt: Any, completion: Any, place: str, name: str) -> tuple[list[ChatMessage], list[ChatMessage]]:
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ConfigError(f"{place}: prompt and {name} must both be texts, or both messages")
    return _messages(prompt, f"{place}: prompt"), _messages(completion, f"{place}: {name}")


def _texts(line: Line) -> list[Any]:
    return [line.values.get(key) for key in ("messages", "prompt", "completion", "chosen", "rejected")]


def _messages(value: Any, place: str) -> list[ChatMessage]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place} must be a list of messages")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ConfigError(f"{place}[{number}] must have a role and a content, both texts")
        if message.get("role") not in ROLES:
            raise ConfigError(f"{place}[{number}].role must be one of {', '.join(ROLES)}, got {message.get('role')!r}")
        messages.append(ChatMessage(message["role"], message["content"]))
    return messages


def shortened(path: Path, problems: list[str]) -> list[str]:
    """The first few problems of a file, and the number of the others."""
    more = len(problems) - MAX_PROBLEMS
    return problems[:MAX_PROBLEMS] + ([f"{path}: and {more} more lines like these"] if more > 0 else [])


@dataclass
class FittingExamples:
    """Examples that fit the model's context, and the changes that this took."""

    examples: list[Any]
    num_truncated: int = 0
    """Number of kept examples that were truncated."""
    num_dropped: int = 0
    """Number of examples without a trained token left."""

    def describe(self, kind: str) -> str:
        told = f"{len(self.examples):,} {kind}"
        if self.num_truncated:
            told += f", {self.num_truncated:,} truncated"
        return told + (f"; {self.num_dropped:,} dropped, too long to learn from" if self.num_dropped else "")


def fitted(examples: Sequence[Example], seq_len: int, is_scored: bool = False) -> FittingExamples:
    """Truncate examples to rows of `seq_len` inputs. Their last token is only a label, so they may have one more;
    not where they are scored there (`is_scored`), for which it is an input, too."""
    result, most = FittingExamples([]), seq_len + (not is_scored)
    for example in examples:
        cut = Example(example.tokens[:most], example.learned[:most])
        if not any(cut.learned[1:]):
            result.num_dropped += 1
            continue
        result.examples.append(cut)
        result.num_truncated += len(cut.tokens) < len(example.tokens)
    return result


def fitted_pairs(pairs: Sequence[Pair], seq_len: int, is_scored: bool = True) -> FittingExamples:
    """Truncate pairs, which a reward model scores at their last tokens; if one text is dropped, so is the other."""
    result = FittingExamples([])
    for pair in pairs:
        both = fitted([pair.chosen, pair.rejected], seq_len, is_scored)
        if both.num_dropped:
            result.num_dropped += 1
            continue
        result.examples.append(pair._replace(chosen=both.examples[0], rejected=both.examples[1]))
        result.num_truncated += bool(both.num_truncated)
    return result


def packed(examples: Sequence[Example], seq_len: int) -> list[list[int]]:
    """Assign examples to rows: longest first, each into the fullest row that still has room (best fit,
    decreasing)."""
    return best_fit([len(example.tokens) - 1 for example in examples], seq_len)


def example_batch(rows: Sequence[Sequence[Example]], seq_len: int) -> Batch:
    """Arrange rows of examples as inputs of a network whose loss weights are a mask: 1 where the label is trained
    on, and the labels are `NO_LABEL` where there is padding. Positions begin anew with each example, so
    attention stays within it."""
    shape = (len(rows), seq_len)
    tokens, positions = (np.zeros(shape, np.int32) for _ in range(2))
    labels, mask = np.full(shape, NO_LABEL, np.int32), np.zeros(shape, np.float32)
    for row, examples in enumerate(rows):
        start = 0
        for example in examples:
            length = len(example.tokens) - 1
            at = slice(start, start + length)
            tokens[row, at], labels[row, at] = example.tokens[:-1], example.tokens[1:]
            positions[row, at] = np.arange(length)
            mask[row, at] = example.learned[1:]
            start += length
        positions[row, start:] = np.arange(seq_len - start)  # padding is a document of its own
    return Batch(tokens, labels, positions, mask)


def ended_batch(examples: Sequence[Example], seq_len: int) -> Batch:
    """Arrange one example a row, complete as inputs, with a mask that is 1 at the last token of each, which
    attends to all. None is longer than a row."""
    shape = (len(examples), seq_len)
    tokens, positions = (np.zeros(shape, np.int32) for _ in range(2))
    mask = np.zeros(shape, np.float32)
    for row, example in enumerate(examples):
        length = len(example.tokens)
        assert 0 < length <= seq_len, (length, seq_len)
        tokens[row, :length] = example.tokens
        positions[row, :length], positions[row, length:] = np.arange(length), np.arange(seq_len - length)
        mask[row, length - 1] = 1
    return Batch(tokens, np.zeros(shape, np.int32), positions, mask)


def identity(lines: Sequence[Line]) -> str:
    """Format all lines as one text, which identifies them."""
    return json.dumps([line.values for line in lines], ensure_ascii=False, sort_keys=True)
