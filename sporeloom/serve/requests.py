# SPDX-License-Identifier: Apache-2.0
"""Requests of clients: the bodies of OpenAI's API, with vLLM's extras, read and validated.

Unknown fields are ignored and logged; what is known but not done here is refused by name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sporeloom.core.log import milestone
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.serve.fields import Fields, RequestError, shown, text_of, token_ids
from sporeloom.serve.messages import NO_TOOLS, ToolUse, read_messages, read_tools, read_variables
from sporeloom.serve.structured import Structure, read_structure

MAX_TOP, MAX_CHOICES, MAX_STOPS, MAX_PROMPTS, MAX_BIASES = 20, 128, 16, 128, 1024
DEFAULT_MAX_TOKENS = 16
MAX_DRAWN_SEED = 2**53
"""Random seeds stay below: JavaScript numbers, in which the page and many clients read answers, are exact up to
it."""
MAX_STOP_LENGTH, MAX_STOP_IDS, MAX_SALT = 1024, 1024, 256
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


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
    prompt_top: int | None = None
    """The same for the tokens of the prompt."""
    logit_bias: dict[int, float]
    stream: bool
    with_usage: bool
    structure: Structure | None = None
    """Form that the answer must have."""
    cache_salt: str = ""
    """Only requests with the same one share the prefix cache."""
    priority: int = 0
    """Waiting requests with lower numbers are served first."""

    @property
    def has_scores(self) -> bool:
        """Whether log-probabilities of new tokens are part of the answer, or decide about it."""
        return self.num_top is not None


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(ApiRequest):
    """Body of /v1/completions."""

    prompts: tuple[str | tuple[int, ...], ...]
    """Texts or token ids."""
    suffix: str | None
    echo: bool
    num_kept: int | None = None
    """Number of choices to return, of `num_choices` that are generated: the most likely ones. None: all."""

    @property
    def has_scores(self) -> bool:
        return super().has_scores or self.num_kept is not None


@dataclass(frozen=True, kw_only=True)
class ChatRequest(ApiRequest):
    """Body of /v1/chat/completions."""

    messages: tuple[ChatMessage, ...]
    variables: dict[str, Any]
    """Variables of the chat template."""
    tools: ToolUse = NO_TOOLS
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    """Maximum number of tokens of reasoning."""


def read_completion(fields: Fields, vocab_size: int) -> CompletionRequest:
    """Raises:
    RequestError: a field that cannot be used.
    """
    prompt = fields.take("prompt", (str, list))
    if prompt is None:
        raise RequestError(400, "prompt is missing", "prompt")
    suffix, echo = fields.take("suffix", str), fields.take("echo", bool, False)
    prompt_top = fields.integer("prompt_logprobs", 0, MAX_TOP, None)
    num_top = fields.integer("logprobs", 0, MAX_TOP, None)
    most = fields.integer("max_tokens", 0, 2**31 - 1, DEFAULT_MAX_TOKENS)
    if most == 0 and not echo and prompt_top is None:
        raise RequestError(
            400, "max_tokens must be at least 1; 0 goes with echo and with prompt_logprobs", "max_tokens"
        )
    if suffix is not None and echo:
        raise RequestError(400, "echo does not go with suffix", "echo")
    common = _common(fields, vocab_size, num_top, most, default_temperature=1.0)
    if prompt_top is not None and common["stream"]:
        raise RequestError(400, "prompt_logprobs does not go with stream; echo with logprobs does", "prompt_logprobs")
    kept = common["num_choices"]
    common["num_choices"] = _best_of(fields, kept, common["stream"])
    return CompletionRequest(
        prompts=tuple(_prompts(prompt, vocab_size)),
        suffix=suffix,
        echo=echo,
        num_kept=kept if common["num_choices"] > kept else None,
        prompt_top=prompt_top,
        **common,
    )


def _best_of(fields: Fields, kept: int, is_streamed: bool) -> int:
    """Number of choices to generate, of which the `kept` most likely ones are returned."""
    made: int = fields.integer("best_of", 1, MAX_CHOICES, kept)
    if made < kept:
        raise RequestError(400, f"best_of must be at least n, {kept}, got {made}", "best_of")
    if made > kept and is_streamed:
        raise RequestError(400, "best_of does not go with stream: the best are known at the end", "best_of")
    return made


def read_chat(fields: Fields, vocab_size: int) -> ChatRequest:
    """Raises:
    RequestError: a field that cannot be used.
    """
    tools, messages = read_tools(fields), read_messages(fields)
    return chat_request(fields, messages, tools, vocab_size)


def chat_request(
    fields: Fields, messages: tuple[ChatMessage, ...], tools: ToolUse, vocab_size: int, param: str = "messages"
) -> ChatRequest:
    """Read the other fields of a conversation. `param`: the field that `messages` come from.

    Raises:
        RequestError: a field that cannot be used.
    """
    if messages[-1].role == "assistant":
        raise RequestError(400, f"{param}: the last one must be the user's, or the result of a tool", param)
    fields.refuse("prompt_logprobs", "log-probabilities of a prompt are at /v1/completions")
    fields.refuse("best_of", "it is a field of /v1/completions", 1, fields.values.get("n"))
    num_top = fields.integer("top_logprobs", 0, MAX_TOP, None)
    if not fields.take("logprobs", bool, False):
        if num_top is not None:
            raise RequestError(400, "top_logprobs goes with logprobs: true", "top_logprobs")
    else:
        num_top = num_top or 0
    older = fields.integer("max_tokens", 1, 2**31 - 1, None)
    most = fields.integer("max_completion_tokens", 1, 2**31 - 1, older)
    return ChatRequest(
        messages=messages,
        variables=read_variables(fields),
        tools=tools,
        reasoning_effort=read_effort(fields),
        thinking_budget=fields.integer("thinking_token_budget", 0, 2**31 - 1, None),
        **_common(fields, vocab_size, num_top, most, default_temperature=1.0),
    )


def read_effort(fields: Fields) -> str | None:
    """Raises:
    RequestError: no such effort.
    """
    effort: str | None = fields.take("reasoning_effort", str)
    if effort not in (None, *EFFORTS):
        raise RequestError(
            400, f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {shown(effort)}", "reasoning_effort"
        )
    return effort


def _common(
    fields: Fields, vocab_size: int, num_top: int | None, most: int | None, default_temperature: float
) -> dict[str, Any]:
    structure = read_structure(fields)
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
    salt = fields.take("cache_salt", str, "")
    if len(salt) > MAX_SALT:
        raise RequestError(400, f"cache_salt: up to {MAX_SALT} characters, got {len(salt)}", "cache_salt")
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
        "structure": structure,
        "cache_salt": salt,
        "priority": fields.integer("priority", -(2**31), 2**31 - 1, 0),
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
        raise RequestError(400, f"prompt must have from 1 to {MAX_PROMPTS} entries, got {len(prompt)}", "prompt")
    else:
        for part in prompt:
            yield text_of(part, "prompt") if not isinstance(part, list) else token_ids(part, "prompt", vocab_size)


def log_unknown(fields: Fields, path: str, seen: set[str]) -> None:
    """Log once for each field that nothing here reads it."""
    for name in fields.unknown():
        quoted = shown(name)
        if quoted not in seen and len(seen) < 100:
            seen.add(quoted)
            milestone(f"{path}: the field {quoted} is unknown and ignored")
