# SPDX-License-Identifier: Apache-2.0
"""Read bodies of /v1/messages as chat requests."""

from __future__ import annotations

from typing import Any

from sporeloom.core.json_text import json_text
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.serve.config import ServedModel
from sporeloom.serve.fields import Fields, RequestError, shown
from sporeloom.serve.messages import read_message, read_tools
from sporeloom.serve.requests import ChatRequest, chat_request
from sporeloom.serve.thinking import can_switch
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

PATH = "/v1/messages"
NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
"""Names of this API, by those of chat requests, for errors."""
FOREIGN = {
    **{"stop": "stop_sequences", "max_completion_tokens": "max_tokens", "reasoning_effort": "output_config.effort"},
    **{"response_format": "output_config.format", "thinking_token_budget": "thinking.budget_tokens"},
    **{"functions": "tools", "function_call": "tool_choice", "parallel_tool_calls": "tool_choice"},
    **{"n": "", "best_of": "", "logprobs": "", "top_logprobs": "", "prompt_logprobs": "", "stream_options": ""},
}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_message_request(fields: Fields, model: ServedModel, with_answer: bool = True) -> ChatRequest:
    """Read a request. `with_answer`: there will be one; otherwise its tokens are counted.

    Raises:
        RequestError: a field that cannot be used.
    """
    _refuse_unsupported(fields)
    most = fields.integer("max_tokens", 1, 2**31 - 1, None)
    if with_answer and most is None:
        raise RequestError(400, "max_tokens is missing", "max_tokens")
    system = joined_text(fields.take("system", (str, list), ""), "system", ("text",))
    choice, is_parallel = _tool_choice(fields)
    own = {
        "max_completion_tokens": most,
        "stop": fields.take("stop_sequences", list, []),
        "tools": [_tool(tool, i) for i, tool in enumerate(fields.take("tools", list, []))] or None,
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        **_thinking(fields, model, most),
    }
    messages = _read_messages(fields)
    chat = chat_fields(fields, own)
    known = (ChatMessage("system", system),) if system else ()
    with renamed(NAMES):
        asked = chat_request(chat, (*known, *messages), read_tools(chat), model.tokenizer.vocab_size)
    fields.taken |= chat.taken
    return asked


def _refuse_unsupported(fields: Fields) -> None:
    refuse_foreign(fields, PATH, FOREIGN)
    fields.refuse("container", "there are no containers")
    fields.refuse("mcp_servers", "there are no servers of tools; send tools", [])
    fields.refuse("context_management", "nothing is left out of a conversation", {})
    fields.refuse("service_tier", "there is one kind of service", "auto", "standard_only")
    fields.refuse("speed", "there is one speed", "standard")
    fields.refuse("inference_geo", "the model runs where this server does")
    for name in ("metadata", "cache_control"):  # who asks, and what a cache shall keep: this one needs no hints
        fields.take(name, dict)


def _thinking(fields: Fields, model: ServedModel, most: int | None) -> dict[str, Any]:
    """Fields of a chat request for `thinking` and `output_config`. Without them the chat template decides."""
    config = fields.take("output_config", dict, {})
    effort = config.get("effort")
    if effort not in (None, *EFFORTS):
        raise RequestError(
            400, f"output_config.effort must be one of {', '.join(EFFORTS)}, got {shown(effort)}", "output_config"
        )
    told: dict[str, Any] = {"reasoning_effort": effort and EFFORTS[effort], "response_format": _form(config)}
    thinking = fields.take("thinking", dict)
    kind = "adaptive" if thinking is None else thinking.get("type")
    if thinking and thinking.get("display") == "omitted":
        raise RequestError(400, "thinking.display: reasoning is part of the answer; disable it, or skip it", "thinking")
    if kind == "disabled":
        told["reasoning_effort"] = "none" if can_switch(model) else None
    elif kind == "enabled":
        assert thinking
        told["thinking_token_budget"] = _budget(thinking, model, most)
        told["reasoning_effort"] = told["reasoning_effort"] or ("medium" if can_switch(model) else None)
    elif kind != "adaptive":
        raise RequestError(400, f"thinking.type must be enabled, disabled or adaptive, got {shown(kind)}", "thinking")
    return told


def _budget(thinking: dict[str, Any], model: ServedModel, most: int | None) -> int:
    if model.form.reasoning is None:
        raise RequestError(400, f"{model.name} has no reasoning; leave thinking out, or disable it", "thinking")
    if thinking.get("budget_tokens") is None:
        raise RequestError(400, "thinking.budget_tokens is missing", "thinking")
    try:
        budget: int = Fields(thinking).integer("budget_tokens", 1, 2**31 - 1, None)
    except RequestError as error:
        raise RequestError(400, f"thinking.{error.message}", "thinking") from None
    if most is not None and budget >= most:
        raise RequestError(400, f"thinking.budget_tokens must be below max_tokens, {most}, got {budget}", "thinking")
    return budget


def _form(config: dict[str, Any]) -> dict[str, Any] | None:
    if config.get("format") is None:
        return None
    form = object_of(config["format"], "output_config.format")
    if form.get("type") != "json_schema":
        raise RequestError(
            400, f"output_config.format.type must be json_schema, got {shown(form.get('type'))}", "output_config"
        )
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _tool(tool: Any, number: int) -> dict[str, Any]:
    place = f"tools[{number}]"
    kind = object_of(tool, place).get("type")
    if kind not in (None, "custom"):
        raise RequestError(400, f"{place}.type: only custom tools are supported, got {shown(kind)}", "tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise RequestError(400, f"{place}.input_schema must be a JSON schema (an object)", "tools")
    function = {key: tool.get(key) for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(fields: Fields) -> tuple[Any, bool | None]:
    """The choice of a chat request, and whether there may be several calls."""
    given = fields.take("tool_choice", dict)
    if given is None:
        return None, None
    is_single = given.get("disable_parallel_tool_use") or False
    if not isinstance(is_single, bool):
        raise RequestError(400, "tool_choice.disable_parallel_tool_use must be true or false", "tool_choice")
    if given.get("type") == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise RequestError(400, f"tool_choice.type must be auto, any, tool or none, got {shown(kind)}", "tool_choice")
    return CHOICES[kind], not is_single


def _read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    given = fields.take("messages", list)
    if not given:
        raise RequestError(400, "messages is missing or empty", "messages")
    turns: list[tuple[str, dict[str, Any]]] = []
    for i, message in enumerate(given):
        place = f"messages[{i}]"
        role = object_of(message, place).get("role")
        if role not in ("user", "assistant"):
            raise RequestError(400, f"{place}.role must be user or assistant, got {shown(role)}", "messages")
        content = message.get("content")
        if content == []:
            raise RequestError(400, f"{place}.content is empty", "messages")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        add = _add_user_block if role == "user" else _add_assistant_block
        start = len(turns)
        for j, block in enumerate(blocks):
            where = f"{place}.content[{j}]" if isinstance(content, list) else f"{place}.content"
            add(turns, start, object_of(block, where), where)
    return tuple(read_message(turn, place) for place, turn in turns)


def _add_user_block(turns: list[tuple[str, dict[str, Any]]], start: int, block: dict[str, Any], place: str) -> None:
    """Add a block of a user's message, whose turns begin at `start`: results of tools are messages of their own."""
    kind = block.get("type")
    if kind == "text":
        text = text_of_param(block.get("text"), place)
        if len(turns) > start and turns[-1][1]["role"] == "user":
            turns[-1][1]["content"] += text
        else:
            turns.append((place, {"role": "user", "content": text}))
    elif kind == "tool_result":
        text = joined_text(block.get("content") or "", f"{place}.content", ("text",))
        turns.append((place, {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}))
    else:
        raise _no_block(kind, place, "text and tool_result")


def _add_assistant_block(
    turns: list[tuple[str, dict[str, Any]]], start: int, block: dict[str, Any], place: str
) -> None:
    """Add a block of an assistant's message, which is the turn at `start`."""
    if len(turns) == start:
        turns.append((place, {"role": "assistant", "content": ""}))
    kind, turn = block.get("type"), turns[start][1]
    if kind == "text":
        turn["content"] += text_of_param(block.get("text"), place)
    elif kind == "thinking":
        text = text_of_param(block.get("thinking"), f"{place}.thinking")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif kind == "tool_use":
        arguments = json_text(object_of(block.get("input"), f"{place}.input"), ensure_ascii=False)
        add_call(turn, block.get("id"), block.get("name"), arguments)
    else:
        raise _no_block(kind, place, "text, thinking and tool_use")


def _no_block(kind: Any, place: str, known: str) -> RequestError:
    return RequestError(400, f"{place}.type: only {known} are supported here, got {shown(kind)}", param_of(place))
