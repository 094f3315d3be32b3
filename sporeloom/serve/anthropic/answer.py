# SPDX-License-Identifier: Apache-2.0
"""Answers of /v1/messages: a message of content blocks, or the events of a stream in their published order."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from sporeloom.core.json_text import json_text
from sporeloom.serve.answers import Answer, Choice, usage
from sporeloom.serve.blocks import Block, Blocks
from sporeloom.serve.config import ServedModel
from sporeloom.serve.fields import RequestError
from sporeloom.serve.requests import ChatRequest

Event = dict[str, Any]
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the form of Anthropic's API; its message names the field."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesAnswer(Answer):
    """Formats a message."""

    end = ""

    def __init__(self, model: ServedModel, asked: ChatRequest):
        super().__init__(model, asked)
        self._blocks = Blocks()
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model.name,
            "seed": asked.seed,
        }

    def whole(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> dict[str, Any]:
        """The message, without a call that was cut, whose arguments are incomplete."""
        (choice,) = choices
        for _ in self._blocks.add(choice, choice.text):
            pass
        content = [_content(block) for block in self._blocks.all if block.kind != "call" or block.arguments is not None]
        return {**self._head, "content": content, **_ending(choice), "usage": _usage(prompts, [choice])}

    def opening(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> list[Event]:
        unset: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": {**self._head, **unset, "usage": _usage(prompts, [])}}]

    def parts(self, choice: Choice, text: str) -> Iterator[Event]:
        for step in self._blocks.add(choice, text):
            if step.phase == "start":
                yield {"type": "content_block_start", "index": step.place, "content_block": _opened(step.block)}
            elif step.phase == "delta":
                yield {"type": "content_block_delta", "index": step.place, "delta": _delta(step.block, step.text)}
            else:
                yield {"type": "content_block_stop", "index": step.place}

    def closing(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> list[Event]:
        (choice,) = choices
        told = {"type": "message_delta", "delta": _ending(choice), "usage": _usage(prompts, [choice])}
        return [told, {"type": "message_stop"}]

    def failure(self, error: RequestError) -> list[Event]:
        return [error_body(error)]

    def event(self, value: Event) -> str:
        return f"event: {value['type']}\ndata: {json_text(value)}\n\n"


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _opened(block: Block) -> dict[str, Any]:
    """A block before its first delta."""
    return {**_content(block), "input": {}} if block.kind == "call" else _content(block)


def _delta(block: Block, text: str) -> dict[str, Any]:
    kind, name = {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]
    return {"type": kind, name: text}


def _ending(choice: Choice) -> dict[str, Any]:
    stop_text = choice.stop_text
    if choice.finish_reason == "length":
        reason = "max_tokens"
    elif choice.parser and choice.parser.has_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop_text if reason == "stop_sequence" else None}


def _usage(prompts: Sequence[tuple[int, ...]], choices: Sequence[Choice]) -> dict[str, Any]:
    counted = usage(prompts, choices)
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "output_tokens": counted["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
