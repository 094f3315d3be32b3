# SPDX-License-Identifier: Apache-2.0
"""Requests of clients: the bodies of OpenAI's API, with vLLM's extras, read and validated.

Unknown fields are ignored and logged; what is known but not done here is refused by name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sporeloom.core.lines import first_line
from sporeloom.core.log import milestone
from sporeloom.data.chat_template import RESERVED
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.inference.sampling import SamplingConfig

MAX_TOP, MAX_CHOICES, MAX_STOPS, MAX_PROMPTS, MAX_BIASES = 20, 128, 16, 128, 1024
DEFAULT_MAX_TOKENS = 16
MAX_DRAWN_SEED = 2**53
"""Random seeds stay below: JavaScript numbers, in which the page and many clients read answers, are exact up to
it."""
MAX_STOP_LENGTH, MAX_STOP_IDS = 1024, 1024
BODY_TIMEOUT_S = 30.0
"""Seconds for a body to arrive."""
ROLES = ("system", "user", "assistant")


class RequestError(Exception):
    """A request that cannot be served. `param`: the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error in the form of OpenAI's API."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """The common fields of a completion and a chat."""

    sampling: SamplingConfig
    seed: int
    """Seed of the request, or a random one."""
    max_tokens: int | None
    """Maximum number of new tokens; None: as many as the context allows."""
    num_choices: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    num_top: int | None
    """Number of most likely tokens to report with each; None: no log-probabilities."""
    logit_bias: dict[int, float]
    stream: bool
    with_usage: bool


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(ApiRequest):
    """Body of /v1/completions."""

    prompts: tuple[str | tuple[int, ...], ...]
    """Texts or token ids."""
    suffix: str | None
    echo: bool


@dataclass(frozen=True, kw_only=True)
class ChatRequest(ApiRequest):
    """Body of /v1/chat/completions."""

    messages: tuple[ChatMessage, ...]
    variables: dict[str, Any]
    """Variables of the chat template."""


@dataclass
class Fields:
    """The fields of a JSON object, each read once; null counts as absent."""

    values: dict[str, Any]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Read a field of this type, or return `default`.

        Raises:
            RequestError: it is of another type.
        """
        self.taken.add(name)
        value = self.values.get(name)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(
                {str: "a string", int: "an integer", float: "a number", bool: "true or false"}.get(
                    each, "a list" if each is list else "an object"
                )
                for each in kinds
                if each is not int or float not in kinds
            )
            raise RequestError(400, f"{name} must be {wanted}, got {shown(value)}", name)
        return text_of(value, name) if isinstance(value, str) else value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name, (int, float), default)
        if not low <= value <= high:  # nor NaN
            raise RequestError(400, f"{name} must be from {low:g} to {high:g}, got {shown(value)}", name)
        return float(value)

    def integer(self, name: str, low: int, high: int, default: int | None) -> Any:
        value = self.take(name, int, default)
        if value is not None and not low <= value <= high:
            raise RequestError(400, f"{name} must be from {low} to {high}, got {shown(value)}", name)
        return value

    def integers(self, name: str, high: int) -> tuple[int, ...]:
        return token_ids(self.take(name, list, []), name, high)

    def refuse(self, name: str, reason: str, *allowed: Any) -> None:
        """Refuse unsupported fields, unless they have no effect."""
        self.taken.add(name)
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise RequestError(400, f"{name}: {reason}", name)

    def unknown(self) -> list[str]:
        return [name for name in self.values if name not in self.taken]


def read_json(body: bytes) -> Fields:
    """Raises:
    RequestError: not a JSON object.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {first_line(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RequestError(400, f"the body must be a JSON object, got {shown(value)}")
    return Fields(value)


def read_completion(fields: Fields, vocab_size: int) -> CompletionRequest:
    """Raises:
    RequestError: a field that cannot be used.
    """
    prompt = fields.take("prompt", (str, list))
    if prompt is None:
        raise RequestError(400, "prompt is missing", "prompt")
    suffix, echo = fields.take("suffix", str), fields.take("echo", bool, False)
    fields.refuse("best_of", "only the choices requested with n are generated", 1, fields.values.get("n"))
    fields.refuse("prompt_logprobs", "log-probabilities of the prompt need echo and logprobs")
    num_top = fields.integer("logprobs", 0, MAX_TOP, None)
    most = fields.integer("max_tokens", 0, 2**31 - 1, DEFAULT_MAX_TOKENS)
    if most == 0 and not echo:
        raise RequestError(400, "max_tokens must be at least 1; 0 goes with echo", "max_tokens")
    if suffix is not None and echo:
        raise RequestError(400, "echo does not go with suffix", "echo")
    return CompletionRequest(
        prompts=tuple(_prompts(prompt, vocab_size)),
        suffix=suffix,
        echo=echo,
        **_common(fields, vocab_size, num_top, most, default_temperature=1.0),
    )


def read_chat(fields: Fields, vocab_size: int) -> ChatRequest:
    """Raises:
    RequestError: a field that cannot be used.
    """
    for name in ("tools", "functions"):
        fields.refuse(name, "tool calls are not supported", [])
    for name in ("tool_choice", "function_call"):
        fields.refuse(name, "tool calls are not supported", "none", "auto")
    messages = read_messages(fields)
    if messages[-1].role == "assistant":
        raise RequestError(400, "messages: the last one must be the user's", "messages")
    num_top = fields.integer("top_logprobs", 0, MAX_TOP, None)
    if not fields.take("logprobs", bool, False):
        if num_top is not None:
            raise RequestError(400, "top_logprobs goes with logprobs: true", "top_logprobs")
    else:
        num_top = num_top or 0
    older = fields.integer("max_tokens", 1, 2**31 - 1, None)
    most = fields.integer("max_completion_tokens", 1, 2**31 - 1, older)
    variables = read_variables(fields)
    return ChatRequest(
        messages=messages, variables=variables, **_common(fields, vocab_size, num_top, most, default_temperature=1.0)
    )


def read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """Raises:
    RequestError: a message that cannot be used.
    """
    given = fields.take("messages", list)
    if not given:
        raise RequestError(400, "messages is missing or empty", "messages")
    return tuple(_message(value, f"messages[{i}]") for i, value in enumerate(given))


def read_variables(fields: Fields) -> dict[str, Any]:
    """Variables for the chat template, besides the messages.

    Raises:
        RequestError: a name that the template has for something else.
    """
    given: dict[str, Any] = fields.take("chat_template_kwargs", dict, {})
    if wrong := [name for name in given if name in RESERVED]:
        raise RequestError(400, f"chat_template_kwargs: a variable cannot be named {wrong[0]}", "chat_template_kwargs")
    return given


def _common(
    fields: Fields, vocab_size: int, num_top: int | None, most: int | None, default_temperature: float
) -> dict[str, Any]:
    fields.refuse("response_format", "only free text is supported", {"type": "text"})
    fields.take("user", str)
    stream = fields.take("stream", bool, False)
    options = fields.take("stream_options", dict, {})
    if options and not stream:
        raise RequestError(400, "stream_options goes with stream: true", "stream_options")
    seed = fields.integer("seed", -(2**63), 2**64 - 1, secrets.randbelow(MAX_DRAWN_SEED))
    stop = fields.take("stop", (str, list), [])
    stops = [text_of(text, "stop") for text in ([stop] if isinstance(stop, str) else stop)]
    if len(stops) > MAX_STOPS or "" in stops:
        raise RequestError(400, f"stop: up to {MAX_STOPS} texts, none of them empty", "stop")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_LENGTH:
        raise RequestError(400, f"stop: texts of up to {MAX_STOP_LENGTH} characters, got one of {longest}", "stop")
    stop_ids = tuple(dict.fromkeys(fields.integers("stop_token_ids", vocab_size)))
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(400, f"stop_token_ids: at most {MAX_STOP_IDS} tokens, got {len(stop_ids)}", "stop_token_ids")
    return {
        "sampling": SamplingConfig(
            temperature=fields.number("temperature", 0, 100, default_temperature),
            top_p=_probability(fields),
            top_k=max(0, fields.integer("top_k", -1, 2**31 - 1, 0)),
            frequency_penalty=fields.number("frequency_penalty", -10, 10, 0),
            presence_penalty=fields.number("presence_penalty", -10, 10, 0),
            repetition_penalty=_repetition_penalty(fields),
            min_new_tokens=fields.integer("min_tokens", 0, 2**31 - 1, 0),
            seed=seed % 2**64,
        ),
        "seed": seed,
        "max_tokens": most,
        "num_choices": fields.integer("n", 1, MAX_CHOICES, 1),
        "stop": tuple(stops),
        "stop_ids": stop_ids,
        "ignore_eos": fields.take("ignore_eos", bool, False),
        "num_top": num_top,
        "logit_bias": _logit_bias(fields, vocab_size),
        "stream": stream,
        "with_usage": bool(options.get("include_usage")),
    }


def _probability(fields: Fields) -> float:
    value = fields.number("top_p", 0, 1, 1)
    if value == 0:
        raise RequestError(400, "top_p must be above 0; temperature 0 takes the most likely token", "top_p")
    return value


def _repetition_penalty(fields: Fields) -> float:
    value = fields.number("repetition_penalty", 0, 100, 1)
    if value == 0:
        raise RequestError(400, "repetition_penalty must be above 0", "repetition_penalty")
    return value


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    given = fields.take("logit_bias", dict, {})
    if len(given) > MAX_BIASES:
        raise RequestError(400, f"logit_bias: at most {MAX_BIASES} tokens", "logit_bias")
    bias = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            raise RequestError(400, f"logit_bias: {shown(name)} is not a token id below {vocab_size}", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise RequestError(400, f"logit_bias of {name} must be from -100 to 100, got {shown(value)}", "logit_bias")
        bias[int(name)] = float(value)
    return bias


def _prompts(prompt: Any, vocab_size: int) -> Iterator[str | tuple[int, ...]]:
    if isinstance(prompt, str):
        yield prompt
    elif prompt and all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
        yield token_ids(prompt, "prompt", vocab_size)
    elif not 0 < len(prompt) <= MAX_PROMPTS:
        raise RequestError(400, f"prompt: from 1 to {MAX_PROMPTS} of them, got {len(prompt)}", "prompt")
    else:
        for part in prompt:
            yield text_of(part, "prompt") if not isinstance(part, list) else token_ids(part, "prompt", vocab_size)


def token_ids(values: Sequence[Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """Read token ids.

    Raises:
        RequestError: something else.
    """
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise RequestError(400, f"{name}: {shown(value)} is not a token id below {vocab_size}", name)
    return tuple(values)


def _message(value: Any, place: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise RequestError(400, f"{place} must be an object, got {shown(value)}", "messages")
    role, content = value.get("role"), value.get("content")
    if role == "developer":
        role = "system"
    if role not in ROLES:
        raise RequestError(400, f"{place}.role must be one of {', '.join(ROLES)}, got {shown(role)}", "messages")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if any(not isinstance(part, str) for part in parts):
            raise RequestError(400, f"{place}.content: only text is supported", "messages")
        content = "".join(map(str, parts))
    return ChatMessage(role, text_of(content, f"{place}.content"))


def text_of(value: Any, name: str) -> str:
    """Read a text that can be written as UTF-8.

    Raises:
        RequestError: something else.
    """
    if not isinstance(value, str):
        raise RequestError(400, f"{name} must be a string, got {shown(value)}", name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(400, f"{name} holds half a character (a lone surrogate)", name) from None
    return value


def log_unknown(fields: Fields, path: str, seen: set[str]) -> None:
    """Log once for each field that nothing here reads it."""
    for name in fields.unknown():
        quoted = shown(name)
        if quoted not in seen and len(seen) < 100:
            seen.add(quoted)
            milestone(f"{path}: the field {quoted} is unknown and ignored")


def shown(value: Any) -> str:
    """Format a value for a message: short, and without control characters."""
    text = ascii(value) if not isinstance(value, str) or not value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
