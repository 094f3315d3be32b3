# SPDX-License-Identifier: Apache-2.0
"""Conversations of requests: messages with calls and their results, and the tools a model may call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sporeloom.data.chat_template import RESERVED
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.serve.fields import Fields, RequestError, shown, text_of

ROLES = ("system", "user", "assistant", "tool")
MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request, and how a model may call them."""

    tools: Sequence[dict[str, Any]] = ()
    """In the form of OpenAI's API, as chat templates read them."""
    choice: Literal["none", "auto", "required"] = "none"
    name: str | None = None
    """Name of the only function that may be called, with `required`."""
    is_parallel: bool = True
    """Whether there may be several calls in an answer."""

    @property
    def offered(self) -> Sequence[dict[str, Any]]:
        """Tools that the prompt names."""
        return () if self.choice == "none" else self.tools

    @property
    def callable(self) -> list[tuple[str, dict[str, Any]]]:
        """Place and function of the tools that may be called."""
        found = [(f"tools[{place}].function", tool["function"]) for place, tool in enumerate(self.tools)]
        return [pair for pair in found if self.name in (None, pair[1]["name"])]


NO_TOOLS = ToolUse()


def read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """Raises:
    RequestError: a message that cannot be used.
    """
    given = fields.take("messages", list)
    if not given:
        raise RequestError(400, "messages is missing or empty", "messages")
    return tuple(read_message(value, f"messages[{i}]") for i, value in enumerate(given))


def read_variables(fields: Fields) -> dict[str, Any]:
    """Variables for the chat template, besides the messages.

    Raises:
        RequestError: a name that the template has for something else.
    """
    given: dict[str, Any] = fields.take("chat_template_kwargs", dict, {})
    if wrong := [name for name in given if name in RESERVED]:
        raise RequestError(400, f"chat_template_kwargs: a variable cannot be named {wrong[0]}", "chat_template_kwargs")
    return given


def read_tools(fields: Fields) -> ToolUse:
    """Raises:
    RequestError: a tool or choice that cannot be used.
    """
    fields.refuse("functions", "send tools", [])
    fields.refuse("function_call", "send tool_choice", "none", "auto")
    tools = fields.take("tools", list, [])
    if len(tools) > MAX_TOOLS:
        raise RequestError(400, f"tools: at most {MAX_TOOLS}, got {len(tools)}", "tools")
    for place, tool in enumerate(tools):
        _check_tool(tool, f"tools[{place}]")
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(400, f"tools: two functions are named {shown(twice)}", "tools")
    choice = fields.take("tool_choice", (str, dict), "auto" if tools else "none")
    is_parallel = fields.take("parallel_tool_calls", bool, True)
    if choice in ("none", "auto") and not tools:
        return NO_TOOLS
    if choice in ("none", "auto", "required"):
        if not tools:
            raise RequestError(400, "tool_choice: required goes with tools", "tool_choice")
        return ToolUse(tools, choice, None, is_parallel)
    return ToolUse(tools, "required", _chosen(choice, names), is_parallel=False)


def _chosen(choice: Any, names: Sequence[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        form = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise RequestError(400, f"tool_choice must be {form}, got {shown(choice)}", "tool_choice")
    if name not in names:
        raise RequestError(400, f"tool_choice: no function in tools is named {shown(name)}", "tool_choice")
    return name


def _check_tool(tool: Any, place: str) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise RequestError(
            400, f'{place} must be {{"type": "function", "function": {{"name": ...}}}}, got {shown(tool)}', "tools"
        )
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            400, f"{place}.function.name must be up to 128 letters, digits, _, . or -, got {shown(name)}", "tools"
        )
    for key, kind, wanted in (("description", str, "a string"), ("parameters", dict, "a JSON schema (an object)")):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise RequestError(400, f"{place}.function.{key} must be {wanted}, got {shown(value)}", "tools")
    if not isinstance(function.get("strict", False), bool | None):
        raise RequestError(400, f"{place}.function.strict must be true or false", "tools")


def read_message(value: Any, place: str) -> ChatMessage:
    """Read a message that stands at `place` of a request.

    Raises:
        RequestError: it cannot be used.
    """
    param = place.partition("[")[0]
    if not isinstance(value, dict):
        raise RequestError(400, f"{place} must be an object, got {shown(value)}", param)
    role, content = value.get("role"), value.get("content")
    if role == "developer":
        role = "system"
    if role not in ROLES:
        raise RequestError(400, f"{place}.role must be one of {', '.join(ROLES)}, got {shown(role)}", param)
    more = _more(value, role, place)
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if any(not isinstance(part, str) for part in parts):
            raise RequestError(400, f"{place}.content: only text is supported", param)
        content = "".join(map(str, parts))
    if content is None and "tool_calls" in more:
        content = ""
    return ChatMessage(role, text_of(content, f"{place}.content"), more or None)


def _more(value: dict[str, Any], role: str, place: str) -> dict[str, Any]:
    """Fields of a message besides role and content, as chat templates read them."""
    more: dict[str, Any] = {}
    param = place.partition("[")[0]
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if value.get(key) is not None:
                more[key] = text_of(value[key], f"{place}.{key}")
    if role == "assistant":
        if value.get("reasoning_content") is not None:
            more["reasoning_content"] = text_of(value["reasoning_content"], f"{place}.reasoning_content")
        calls = value.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise RequestError(400, f"{place}.tool_calls must be a list, got {shown(calls)}", param)
        if calls:
            more["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return more


def _call(value: Any, place: str) -> dict[str, Any]:
    """A call of a message; its arguments, a JSON text, become the object that chat templates expect."""
    function, param = value.get("function") if isinstance(value, dict) else None, place.partition("[")[0]
    if not isinstance(function, dict):
        raise RequestError(400, f"{place} must be an object with `function`, got {shown(value)}", param)
    name, text = text_of(function.get("name"), f"{place}.function.name"), function.get("arguments")
    try:
        arguments = json.loads(text_of("{}" if text in (None, "") else text, f"{place}.function.arguments"))
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            400, f"{place}.function.arguments must be the JSON text of an object, got {shown(text)}", param
        )
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    identity = value.get("id")
    return called if identity is None else {"id": text_of(identity, f"{place}.id"), **called}
