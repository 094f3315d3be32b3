# SPDX-License-Identifier: Apache-2.0
"""Read bodies of /v1/responses as chat requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sporeloom.data.tokenizer import ChatMessage
from sporeloom.serve.config import ServedModel
from sporeloom.serve.fields import Fields, RequestError, shown
from sporeloom.serve.messages import read_message, read_tools
from sporeloom.serve.requests import ChatRequest, chat_request
from sporeloom.serve.responses.store import ResponseStore
from sporeloom.serve.translation import (
    add_call,
    chat_fields,
    joined_text,
    object_of,
    param_of,
    refuse_foreign,
    renamed,
    text_of_param,
)

PATH = "/v1/responses"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""Names of this API, by those of chat requests, for errors."""
FOREIGN = {
    **{"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
    **{"reasoning_effort": "reasoning.effort", "response_format": "text.format", "functions": "tools"},
    **{"function_call": "tool_choice", "n": "", "best_of": "", "logprobs": "", "prompt_logprobs": ""},
}
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
TEXT_PARTS = ("input_text", "output_text", "text")
INCLUDED = ("reasoning.encrypted_content",)
"""Extras without effect: reasoning items always have their text, which can be sent back."""


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    """Body of /v1/responses."""

    echoed: dict[str, Any]
    """Fields that the response repeats."""
    conversation: tuple[ChatMessage, ...]
    """`messages` without instructions."""
    is_stored: bool
    client: int = 0
    """Number of the key of the client, who alone may continue from the response."""


def read_response_request(
    fields: Fields, model: ServedModel, store: ResponseStore, client: int = 0
) -> ResponsesRequest:
    """Raises:
    RequestError: a field that cannot be used.
    """
    _refuse_unsupported(fields)
    instructions, previous = fields.take("instructions", str), fields.take("previous_response_id", str)
    earlier = store.get(previous, client, "previous_response_id").messages if previous else ()
    conversation = (*earlier, *_read_input(fields))
    for name in ("tools", "tool_choice", "text"):
        _check_numbers(fields.values.get(name), name)
    echoed = {
        "instructions": instructions,
        "previous_response_id": previous,
        "metadata": _metadata(fields),
        "max_output_tokens": fields.integer("max_output_tokens", 1, 2**31 - 1, None),
        "reasoning": {"effort": _effort(fields), "summary": None},
        "text": {"format": _text_format(fields)},
        "tools": fields.values.get("tools") or [],
        "tool_choice": fields.values.get("tool_choice") or "auto",
        "parallel_tool_calls": fields.values.get("parallel_tool_calls") is not False,
        "user": fields.values.get("user"),
    }
    own = {
        "tools": [_tool(tool, i) for i, tool in enumerate(fields.take("tools", list, []))] or None,
        "tool_choice": _tool_choice(fields),
        "max_completion_tokens": echoed["max_output_tokens"],
        "reasoning_effort": echoed["reasoning"]["effort"],
        "response_format": _chat_format(echoed["text"]["format"]),
    }
    is_stored = fields.take("store", bool, store.is_on)
    if is_stored and not store.is_on:
        raise RequestError(400, "store: this server keeps no responses (--response-store-mb 0)", "store")
    chat = chat_fields(fields, own)
    system = (ChatMessage("system", instructions),) if instructions else ()
    with renamed(NAMES):
        asked = chat_request(chat, (*system, *conversation), read_tools(chat), model.tokenizer.vocab_size)
    fields.taken |= chat.taken
    return ResponsesRequest(**vars(asked), echoed=echoed, conversation=conversation, is_stored=is_stored, client=client)


def _check_numbers(value: Any, name: str) -> None:
    """Raises:
    RequestError: a number that no JSON can repeat.
    """
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, float) and not math.isfinite(part):
            raise RequestError(400, f"{name} holds NaN or infinity, which JSON does not have", name)
        if isinstance(part, list | dict):
            waiting += part.values() if isinstance(part, dict) else part


def _refuse_unsupported(fields: Fields) -> None:
    refuse_foreign(fields, PATH, FOREIGN)
    fields.refuse("background", "responses are made while the client waits", False)
    fields.refuse("conversation", "send previous_response_id, or the whole conversation as input")
    fields.refuse("prompt", "there are no stored prompts; send instructions and input")
    fields.refuse("max_tool_calls", "there are no built-in tools")
    fields.refuse("truncation", "an input that is too long is refused", "disabled")
    fields.refuse("service_tier", "there is one kind of service", "auto", "default")
    fields.refuse("context_management", "nothing is left out of a conversation", [])
    fields.refuse("top_logprobs", "log-probabilities are at /v1/chat/completions", 0)
    for name in ("safety_identifier", "prompt_cache_key", "prompt_cache_retention"):
        fields.take(name, str)
    options = fields.take("stream_options", dict, {})
    if options.get("include_obfuscation"):
        raise RequestError(400, "stream_options.include_obfuscation: events are not padded", "stream_options")
    for name in fields.take("include", list, []):
        if name not in INCLUDED:
            raise RequestError(400, f"include: {shown(name)} is not supported", "include")


def _metadata(fields: Fields) -> dict[str, str]:
    given: dict[str, Any] = fields.take("metadata", dict, {})
    is_short = len(given) <= MAX_METADATA and all(
        len(key) <= MAX_KEY and isinstance(value, str) and len(value) <= MAX_VALUE for key, value in given.items()
    )
    if not is_short:
        raise RequestError(
            400,
            f"metadata: up to {MAX_METADATA} texts of {MAX_VALUE} characters, their names of {MAX_KEY}",
            "metadata",
        )
    return {text_of_param(key, "metadata"): text_of_param(value, "metadata") for key, value in given.items()}


def _effort(fields: Fields) -> Any:
    given: dict[str, Any] = fields.take("reasoning", dict, {})
    for name in ("summary", "generate_summary"):
        if given.get(name) is not None:
            raise RequestError(
                400, f"reasoning.{name}: there are no summaries; reasoning items have their full text", "reasoning"
            )
    return given.get("effort")


def _text_format(fields: Fields) -> dict[str, Any]:
    given: dict[str, Any] = fields.take("text", dict, {})
    if given.get("verbosity") not in (None, "medium"):
        raise RequestError(400, "text.verbosity: say in the instructions how long answers shall be", "text")
    return {"type": "text"} if given.get("format") is None else object_of(given["format"], "text.format")


def _chat_format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


def _tool(tool: Any, number: int) -> dict[str, Any]:
    place = f"tools[{number}]"
    kind = object_of(tool, place).get("type")
    if kind != "function":
        raise RequestError(400, f"{place}.type: only function is supported, got {shown(kind)}", "tools")
    return {"type": kind, "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(fields: Fields) -> Any:
    given = fields.take("tool_choice", (str, dict))
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise RequestError(
            400,
            f'tool_choice must be "none", "auto", "required" or {{"type": "function", "name": ...}}, '
            f"got {shown(given)}",
            "tool_choice",
        )
    return {"type": "function", "function": {"name": given.get("name")}}


def _read_input(fields: Fields) -> tuple[ChatMessage, ...]:
    given = fields.take("input", (str, list))
    if not given:
        raise RequestError(400, "input is missing or empty", "input")
    if isinstance(given, str):
        return (ChatMessage("user", given),)
    turns: list[tuple[str, dict[str, Any]]] = []
    for i, item in enumerate(given):
        place = f"input[{i}]"
        _add_item(turns, object_of(item, place), place)
    return tuple(read_message(turn, place) for place, turn in turns)


def _add_item(turns: list[tuple[str, dict[str, Any]]], item: dict[str, Any], place: str) -> None:
    """Add an item to a conversation: reasoning, text and calls that follow each other are one message of the
    assistant."""
    last = turns[-1][1] if turns and turns[-1][1]["role"] == "assistant" else None
    kind = item.get("type", "message")
    if kind == "message":
        text = joined_text(item.get("content"), f"{place}.content", TEXT_PARTS)
        if item.get("role") != "assistant":
            turns.append((place, {"role": item.get("role"), "content": text}))
        elif last and not last["content"] and "tool_calls" not in last:
            last["content"] = text
        else:
            turns.append((place, {"role": "assistant", "content": text}))
    elif kind == "reasoning":
        text = joined_text(item.get("content") or [], f"{place}.content", ("reasoning_text",))
        turns.append((place, {"role": "assistant", "content": "", "reasoning_content": text}))
    elif kind == "function_call":
        if last is None:
            turns.append((place, last := {"role": "assistant", "content": ""}))
        add_call(last, item.get("call_id"), item.get("name"), item.get("arguments"))
    elif kind == "function_call_output":
        text = joined_text(item.get("output"), f"{place}.output", TEXT_PARTS)
        turns.append((place, {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}))
    else:
        raise RequestError(400, f"{place}.type: {shown(kind)} is not supported", param_of(place))
