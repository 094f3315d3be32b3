# SPDX-License-Identifier: Apache-2.0
"""Answers in the shapes of OpenAI's API, built from the events of the scheduler."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sporeloom.data.tokenizer import Tokenizer
from sporeloom.inference.sampling import Processor, TokenScore, finite
from sporeloom.inference.scheduler import NewToken
from sporeloom.inference.session import Completion, StopConditions
from sporeloom.serve.config import ServedModel
from sporeloom.serve.parsing import Delta, MessageParser, message_of
from sporeloom.serve.requests import ChatRequest, CompletionRequest
from sporeloom.serve.token_texts import token_by_id, token_offsets, token_text


@dataclass
class Choice:
    """One choice of an answer, while it is generated."""

    index: int
    prompt: Sequence[int]
    stop: StopConditions
    completion: Completion
    echo: str | None = None
    """The prompt's text, where it is part of the answer."""
    scores: list[TokenScore | None] = field(default_factory=list)
    """Scores of the tokens of the answer; None: the first token of a prompt."""
    finish_reason: str | None = None
    cached_tokens: int = 0
    """Number of the prompt's tokens that the prefix cache had."""
    num_sent: int = 0
    """Character offset of each of `scores`."""
    processors: tuple[Processor, ...] = ()
    """Processors of its logits, besides those of all requests."""
    parser: MessageParser | None = None
    """Parser of its text, where the model's answers have parts."""
    position: int = field(init=False)
    """Number of characters of the answer from the generated tokens so far."""

    def __post_init__(self) -> None:
        self.position = len(self.echo or "")
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, new: NewToken) -> str:
        """Add a token. Returns the text that is certain now."""
        self.scores.append(TokenScore(new.token, new.log_probability, new.top))
        self.cached_tokens = new.cached_tokens
        text = self.stop.add(self.completion, new)
        self.finish_reason = new.finish_reason
        return text

    @property
    def text(self) -> str:
        return (self.echo or "") + self.completion.text

    def token_bytes(self, token: int) -> bytes:
        """Text that a generated token adds; one that ends the text adds nothing."""
        return b"" if token in self.stop.stop_ids else self.stop.tokenizer.token_bytes(token)

    def new_scores(self) -> Iterator[tuple[TokenScore | None, int]]:
        """Scores that were not taken yet, and the character offsets of their tokens."""
        for score in self.scores[self.num_sent :]:
            offset = self.position
            if self.num_sent < len(self._prompt_offsets):
                offset = self._prompt_offsets[self.num_sent]
            elif score:
                self.position += len(self._characters.decode(self.token_bytes(score.token)))
            self.num_sent += 1
            yield score, offset

    @cached_property
    def _prompt_offsets(self) -> list[int]:
        return [] if self.echo is None else token_offsets(self.stop.tokenizer, self.prompt, self.echo)


def completion_logprobs(choice: Choice, num_top: int) -> dict[str, Any]:
    """Log-probabilities of the tokens that were not sent yet, in the form of /v1/completions."""
    told: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    tokenizer = choice.stop.tokenizer
    for score, offset in choice.new_scores():
        told["text_offset"].append(offset)
        told["tokens"].append(token_text(tokenizer, score.token if score else choice.prompt[0]))
        told["token_logprobs"].append(score and finite(score.log_probability))
        told["top_logprobs"].append(score and _by_text(tokenizer, score, num_top))
    return told


def _by_text(tokenizer: Tokenizer, score: TokenScore, num_top: int) -> dict[str, float]:
    """A token and the most likely ones, by their texts. Of several with one text the token itself, or else the
    most likely, has it; the others go by their ids."""
    found = dict(score.top[:num_top])
    found.setdefault(score.token, score.log_probability)
    names = {token_text(tokenizer, score.token): score.token}
    for token in found:
        names.setdefault(token_text(tokenizer, token), token)
    texts = {token: text for text, token in names.items()}
    return {texts.get(token, token_by_id(token)): finite(value) for token, value in found.items()}


def chat_logprobs(choice: Choice) -> dict[str, Any]:
    """Log-probabilities of the tokens that were not sent yet, in the form of /v1/chat/completions."""

    def entry(token: int, log_probability: float) -> dict[str, Any]:
        text = token_text(choice.stop.tokenizer, token)
        return {"token": text, "logprob": finite(log_probability), "bytes": list(choice.token_bytes(token))}

    content = [
        entry(score.token, score.log_probability) | {"top_logprobs": [entry(*pair) for pair in score.top]}
        for score, _ in choice.new_scores()
        if score
    ]
    return {"content": content, "refusal": None}


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """Usage: tokens of the prompts, each counted once and cached where they were for its first choice, and of the answers."""
    first = choices[:: max(1, len(choices) // max(1, len(prompts)))]
    details = {"cached_tokens": sum(choice.cached_tokens for choice in first)}
    prompt, made = sum(map(len, prompts)), sum(len(choice.completion.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": details,
    }


def head(kind: str, prefix: str, model: str, seed: int) -> dict[str, Any]:
    """Fields that every part of an answer begins with. `seed`: the one that was used, so that the answer can be
    reproduced."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "seed": seed,
    }


class CompletionAnswer:
    """Formats answers of /v1/completions."""

    def __init__(self, model: ServedModel, asked: CompletionRequest):
        self.model, self.asked = model, asked
        self.head = head("text_completion", "cmpl", model.name, asked.seed)

    def whole(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> dict[str, Any]:
        told = [self._choice(choice, choice.text) for choice in choices]
        return {**self.head, "choices": told, "usage": usage(prompts, choices)}

    def opening(self, choices: list[Choice]) -> list[dict[str, Any]]:
        return []

    def parts(self, choice: Choice, text: str) -> list[dict[str, Any]]:
        return [{**self.head, "choices": [self._choice(choice, text)]}]

    def _choice(self, choice: Choice, text: str) -> dict[str, Any]:
        logprobs = None
        if self.asked.num_top is not None:
            logprobs = completion_logprobs(choice, self.asked.num_top)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
        }


class ChatAnswer:
    """Formats answers of /v1/chat/completions."""

    def __init__(self, model: ServedModel, asked: ChatRequest):
        self.model, self.asked = model, asked
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self.head = head(kind, "chatcmpl", model.name, asked.seed)

    def whole(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> dict[str, Any]:
        told = [self._choice(c, "message", message_of(_deltas(c, c.text))) for c in choices]
        return {**self.head, "choices": told, "usage": usage(prompts, choices)}

    def opening(self, choices: list[Choice]) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {**self.head, "choices": [{"index": c.index, "delta": delta, "logprobs": None, "finish_reason": None}]}
            for c in choices
        ]

    def parts(self, choice: Choice, text: str) -> list[dict[str, Any]]:
        """Chunks of a stream: a delta each. The first has the log-probabilities, the last the reason of the end."""
        deltas = _deltas(choice, text)
        ends = [False] * (len(deltas) - 1) + [True]
        return [
            {**self.head, "choices": [self._choice(choice, "delta", delta, is_last)]}
            for delta, is_last in zip(deltas, ends, strict=True)
        ]

    def _choice(self, choice: Choice, name: str, value: dict[str, Any], is_last: bool = True) -> dict[str, Any]:
        logprobs = None if self.asked.num_top is None else chat_logprobs(choice)
        reason = choice.finish_reason if is_last else None
        if reason == "stop" and choice.parser and choice.parser.has_calls:
            reason = "tool_calls"
        return {"index": choice.index, name: value, "logprobs": logprobs, "finish_reason": reason}


def _deltas(choice: Choice, text: str) -> list[Delta]:
    """Parts of a message that its new text completes, at least one; all that is left where the text has ended."""
    if choice.parser is None:
        return [{"content": text}]
    deltas = choice.parser.add(text) + (choice.parser.end() if choice.finish_reason else [])
    return deltas or [{}]
