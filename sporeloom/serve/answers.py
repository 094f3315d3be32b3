# SPDX-License-Identifier: Apache-2.0
"""Answers in the shapes of OpenAI's API, built from the events of the scheduler."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sporeloom.data.tokenizer import Tokenizer
from sporeloom.inference.sampling import TokenScore
from sporeloom.inference.scheduler import NewToken
from sporeloom.inference.session import Completion, StopConditions
from sporeloom.serve.config import ServedModel
from sporeloom.serve.requests import ChatAsked, CompletionAsked


@dataclass
class Choice:
    """One text in the making."""

    index: int
    prompt: Sequence[int]
    stop: StopConditions
    completion: Completion
    echo: str | None = None
    """The prompt's text, where it is part of the answer."""
    scores: list[TokenScore | None] = field(default_factory=list)
    """Of the tokens of the answer; None: the first of a prompt."""
    finish_reason: str | None = None
    sent_scores: int = 0
    text_offset: int = 0

    def add(self, new: NewToken) -> str:
        """Book a token. Returns the text that is certain now."""
        self.scores.append(TokenScore(new.token, new.log_probability, new.top))
        text = self.stop.add(self.completion, new)
        self.finish_reason = new.finish_reason
        return text

    @property
    def text(self) -> str:
        return (self.echo or "") + self.completion.text

    def new_scores(self) -> list[TokenScore | None]:
        """Those that were not taken yet."""
        scores, self.sent_scores = self.scores[self.sent_scores :], len(self.scores)
        return scores


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token alone; one that no tokenizer has (padding of the vocabulary) by its number."""
    return tokenizer.decode([token]) if token < tokenizer.vocab_size else f"<{token}>"


def completion_logprobs(choice: Choice, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of the tokens that were not told yet, as /v1/completions says them."""
    told: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    first = choice.prompt[0] if choice.echo is not None else 0
    for score in choice.new_scores():
        text = token_text(tokenizer, score.token if score else first)
        told["text_offset"].append(choice.text_offset)
        choice.text_offset += len(text)
        told["tokens"].append(text)
        told["token_logprobs"].append(score and score.log_probability)
        if score is None or not num_top:
            told["top_logprobs"].append(None if score is None else {text: score.log_probability})
            continue
        top: dict[str, float] = {}
        for token, log_probability in (*score.top, (score.token, score.log_probability)):
            top.setdefault(token_text(tokenizer, token), log_probability)  # of equal texts the likeliest
        told["top_logprobs"].append(top)
    return told


def chat_logprobs(choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of the tokens that were not told yet, as /v1/chat/completions says them."""

    def entry(token: int, log_probability: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": log_probability, "bytes": list(text.encode())}

    content = [
        entry(score.token, score.log_probability) | {"top_logprobs": [entry(*pair) for pair in score.top]}
        for score in choice.new_scores()
        if score
    ]
    return {"content": content, "refusal": None}


def usage(prompts: Iterable[Sequence[int]], choices: Iterable[Choice]) -> dict[str, int]:
    """Tokens of the prompts, each counted once, and of the answers."""
    prompt, made = sum(map(len, prompts)), sum(len(choice.completion.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def head(kind: str, prefix: str, model: str, seed: int) -> dict[str, Any]:
    """What every part of an answer begins with. `seed`: the one that was used, so that the answer can be had again."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "seed": seed,
    }


class CompletionAnswer:
    """Answers of /v1/completions."""

    def __init__(self, model: ServedModel, asked: CompletionAsked):
        self.model, self.asked = model, asked
        self.head = head("text_completion", "cmpl", model.name, asked.sampling.seed)

    def whole(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> dict[str, Any]:
        told = [self._choice(choice, choice.text) for choice in choices]
        return {**self.head, "choices": told, "usage": usage(prompts, choices)}

    def opening(self, choices: list[Choice]) -> list[dict[str, Any]]:
        return []

    def part(self, choice: Choice, text: str) -> dict[str, Any]:
        return {**self.head, "choices": [self._choice(choice, text)]}

    def _choice(self, choice: Choice, text: str) -> dict[str, Any]:
        logprobs = None
        if self.asked.num_top is not None:
            logprobs = completion_logprobs(choice, self.asked.num_top, self.model.tokenizer)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
        }


class ChatAnswer:
    """Answers of /v1/chat/completions."""

    def __init__(self, model: ServedModel, asked: ChatAsked):
        self.model, self.asked = model, asked
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self.head = head(kind, "chatcmpl", model.name, asked.sampling.seed)

    def whole(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> dict[str, Any]:
        told = [self._choice(c, "message", {"role": "assistant", "content": c.text}) for c in choices]
        return {**self.head, "choices": told, "usage": usage(prompts, choices)}

    def opening(self, choices: list[Choice]) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {**self.head, "choices": [{"index": c.index, "delta": delta, "logprobs": None, "finish_reason": None}]}
            for c in choices
        ]

    def part(self, choice: Choice, text: str) -> dict[str, Any]:
        return {**self.head, "choices": [self._choice(choice, "delta", {"content": text})]}

    def _choice(self, choice: Choice, name: str, value: dict[str, Any]) -> dict[str, Any]:
        logprobs = None if self.asked.num_top is None else chat_logprobs(choice, self.model.tokenizer)
        return {"index": choice.index, name: value, "logprobs": logprobs, "finish_reason": choice.finish_reason}
