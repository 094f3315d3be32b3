# SPDX-License-Identifier: Apache-2.0
"""Answers in the shapes of OpenAI's API, built from the events of the scheduler."""

from __future__ import annotations

import codecs
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sporeloom.core.json_text import json_text
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.inference.parsing import Delta, MessageParser, message_of
from sporeloom.inference.requests import NewToken
from sporeloom.inference.sampling import Processor, TokenScore, finite
from sporeloom.inference.session import Completion, StopConditions
from sporeloom.serve.config import ServedModel
from sporeloom.serve.fields import RequestError
from sporeloom.serve.requests import ApiRequest, ChatRequest, CompletionRequest
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
    prompt_scores: list[TokenScore | None] = field(default_factory=list)
    """Scores of the prompt's tokens, where they are requested."""
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

    @property
    def mean_log_probability(self) -> float:
        """Mean log-probability of the generated tokens; minus infinity where there are none."""
        made = self.completion.log_probabilities
        return sum(made) / len(made) if made else -math.inf

    @property
    def stop_text(self) -> str | None:
        """The stop sequence that ended the text, if one did."""
        if self.finish_reason != "stop" or not self.stop.stop_texts:
            return None
        whole = self.stop.tokenizer.decode(self.completion.tokens)
        rest = whole[len(self.completion.text) :]
        return next((text for text in self.stop.stop_texts if rest.startswith(text)), None)

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


def prompt_logprobs(choice: Choice, num_top: int) -> list[dict[str, Any] | None]:
    """Log-probabilities of the prompt's tokens, in vLLM's form; None for the first. `rank` counts from 1, and is null
    beyond the `num_top` most likely tokens."""
    tokenizer = choice.stop.tokenizer
    told = list[dict[str, Any] | None]()
    for score in choice.prompt_scores:
        if score is None:
            told.append(None)
            continue
        top = score.top[:num_top]
        ranks = {token: rank for rank, (token, _) in enumerate(top, 1)}
        told.append(
            {
                str(token): {
                    "logprob": finite(value),
                    "rank": ranks.get(token),
                    "decoded_token": token_text(tokenizer, token),
                }
                for token, value in ((score.token, score.log_probability), *top)
            }
        )
    return told


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


class Answer(ABC):
    """Formats the answers to one request in the shapes of an API: complete, or as the events of a stream."""

    def __init__(self, model: ServedModel, asked: ApiRequest):
        self.model, self.asked = model, asked

    @abstractmethod
    def whole(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> dict[str, Any]:
        """The complete answer."""

    @abstractmethod
    def opening(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> Iterable[dict[str, Any]]:
        """Events before the first token."""

    @abstractmethod
    def parts(self, choice: Choice, text: str) -> Iterable[dict[str, Any]]:
        """Events of new text; with its `finish_reason` a choice has ended."""

    @abstractmethod
    def closing(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> Iterable[dict[str, Any]]:
        """Events after the last token."""

    def failure(self, error: RequestError) -> Iterable[dict[str, Any]]:
        """Events that end a stream early."""
        return [error.body]

    def event(self, value: dict[str, Any]) -> str:
        """An event as it is sent."""
        return f"data: {json_text(value)}\n\n"

    end = "data: [DONE]\n\n"
    """Line that follows the last event."""


class OpenAIAnswer(Answer):
    """Base of both completions: their streams end alike."""

    head: dict[str, Any]

    def closing(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> list[dict[str, Any]]:
        return [{**self.head, "choices": [], "usage": usage(prompts, choices)}] if self.asked.with_usage else []


class CompletionAnswer(OpenAIAnswer):
    """Formats answers of /v1/completions."""

    asked: CompletionRequest

    def __init__(self, model: ServedModel, asked: CompletionRequest):
        super().__init__(model, asked)
        self.head = head("text_completion", "cmpl", model.name, asked.seed)

    def whole(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> dict[str, Any]:
        told = [{**self._choice(c, c.text), "index": index} for index, c in enumerate(self._best(choices))]
        return {**self.head, "choices": told, "usage": usage(prompts, choices)}

    def _best(self, choices: list[Choice]) -> Iterator[Choice]:
        """The `num_kept` choices of each prompt that the model finds most likely, a token; all, in their order."""
        of_each, kept = self.asked.num_choices, self.asked.num_kept
        for start in range(0, len(choices), of_each):
            found = choices[start : start + of_each]
            ranked = sorted(found, key=lambda choice: -choice.mean_log_probability)
            yield from found if kept is None else ranked[:kept]

    def opening(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> list[dict[str, Any]]:
        return []

    def parts(self, choice: Choice, text: str) -> list[dict[str, Any]]:
        return [{**self.head, "choices": [self._choice(choice, text)]}]

    def _choice(self, choice: Choice, text: str) -> dict[str, Any]:
        logprobs = None
        if self.asked.num_top is not None:
            logprobs = completion_logprobs(choice, self.asked.num_top)
        told = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
        }
        if self.asked.prompt_top is not None:
            told["prompt_logprobs"] = prompt_logprobs(choice, self.asked.prompt_top)
        return told


class ChatAnswer(OpenAIAnswer):
    """Formats answers of /v1/chat/completions."""

    def __init__(self, model: ServedModel, asked: ChatRequest):
        super().__init__(model, asked)
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self.head = head(kind, "chatcmpl", model.name, asked.seed)

    def whole(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> dict[str, Any]:
        told = [self._choice(c, "message", message_of(deltas_of(c, c.text))) for c in choices]
        return {**self.head, "choices": told, "usage": usage(prompts, choices)}

    def opening(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {**self.head, "choices": [{"index": c.index, "delta": delta, "logprobs": None, "finish_reason": None}]}
            for c in choices
        ]

    def parts(self, choice: Choice, text: str) -> list[dict[str, Any]]:
        """Chunks of a stream: a delta each. The first has the log-probabilities, the last the reason of the end."""
        deltas = deltas_of(choice, text)
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


def deltas_of(choice: Choice, text: str) -> list[Delta]:
    """Parts of a message that its new text completes, at least one; all that is left where the text has ended."""
    if choice.parser is None:
        return [{"content": text}]
    deltas = choice.parser.add(text) + (choice.parser.end() if choice.finish_reason else [])
    return deltas or [{}]
