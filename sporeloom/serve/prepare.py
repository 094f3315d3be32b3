# SPDX-License-Identifier: Apache-2.0
"""What a request becomes before the model is asked: prompts in tokens, and a choice for each text that is wanted of them.

All of it takes time that depends on what a client sent: it is for worker threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sporeloom.data.chat_template import ChatTemplateError
from sporeloom.data.tokenizer import ChatMessage, Prompt, chat_prompt, infill_prompt
from sporeloom.errors import ConfigError
from sporeloom.inference.session import Completion, StopConditions
from sporeloom.serve.answers import Choice
from sporeloom.serve.config import ServedModel, ServeJob
from sporeloom.serve.requests import Asked, ChatAsked, CompletionAsked, RequestError


@dataclass(frozen=True)
class Prepared:
    """A request whose texts can be made."""

    prompts: list[tuple[int, ...]]
    choices: list[Choice]
    rooms: list[int]
    """Tokens that each choice may have."""


def prepare_completion(job: ServeJob, model: ServedModel, asked: CompletionAsked) -> Prepared:
    """Raises:
    RequestError: it cannot be done.
    """
    check_count(job, asked, len(asked.prompts))
    stop, prepared = stop_conditions(model, asked), Prepared([], [], [])
    for prompt in asked.prompts:
        tokens = _tokens(model, prompt, asked.suffix)
        room = room_for(job, tokens, asked)  # before the prompt is made a text again: it may be of any length
        echo = _text(model, prompt) if asked.echo else None
        _add(prepared, tokens, room, stop, asked, echo)
    return prepared


def prepare_chat(job: ServeJob, model: ServedModel, asked: ChatAsked) -> Prepared:
    """Raises:
    RequestError: it cannot be done.
    """
    check_count(job, asked, 1)
    stop, prepared = stop_conditions(model, asked), Prepared([], [], [])
    tokens = chat_tokens(model, asked.messages, asked.variables).tokens
    _add(prepared, tokens, room_for(job, tokens, asked), stop, asked)
    return prepared


def _add(
    prepared: Prepared,
    tokens: tuple[int, ...],
    room: int,
    stop: StopConditions,
    asked: Asked,
    echo: str | None = None,
) -> None:
    prepared.prompts.append(tokens)
    for _ in range(asked.num_choices):
        prepared.choices.append(Choice(len(prepared.choices), tokens, stop, Completion(""), echo))
        prepared.rooms.append(room)


def check_count(job: ServeJob, asked: Asked, num_prompts: int) -> None:
    """Raises:
    RequestError: more texts than the server ever holds; to come again later would be of no use.
    """
    texts, most = asked.num_choices * num_prompts, job.max_texts
    if texts > most:
        raise RequestError(
            400,
            f"n: {asked.num_choices} choices of {num_prompts} prompts are {texts} texts, and this server holds at most "
            f"{most} ({job.config.max_queue} that wait and {job.num_rows} at work); send several requests",
            "n",
        )


def stop_conditions(model: ServedModel, asked: Asked) -> StopConditions:
    """Raises:
    RequestError: no token would be left to choose.
    """
    stop_ids = (() if asked.ignore_eos else model.stop_ids) + asked.stop_ids
    if asked.sampling.leaves_none(stop_ids, model.tokenizer.vocab_size):
        raise RequestError(400, "min_tokens and stop_token_ids leave no token to choose", "min_tokens")
    return StopConditions(model.tokenizer, stop_ids, asked.stop)


def room_for(job: ServeJob, prompt: tuple[int, ...], asked: Asked) -> int:
    """Tokens that may be made.

    Raises:
        RequestError: there is no room for as many as are asked for.
    """
    most, room = job.max_model_len, job.max_model_len - len(prompt)
    if not prompt:
        raise RequestError(400, "the prompt holds no token", "prompt")
    if room < (1 if asked.max_tokens is None else asked.max_tokens):
        wanted = "" if asked.max_tokens is None else f" and {asked.max_tokens} more"
        raise RequestError(
            400, f"this model's context is {most} tokens; the prompt has {len(prompt)}{wanted}", "max_tokens"
        )
    if asked.sampling.min_new_tokens > (room if asked.max_tokens is None else asked.max_tokens):
        raise RequestError(400, "min_tokens is more than max_tokens", "min_tokens")
    return room if asked.max_tokens is None else asked.max_tokens


def check_chats(model: ServedModel) -> None:
    """Raises:
    RequestError: it is a base model.
    """
    if not hasattr(model.tokenizer, "chat"):
        raise RequestError(
            400, f"{model.name} is a base model: it has no chat template. Use /v1/completions", "messages"
        )


def chat_tokens(
    model: ServedModel, messages: Sequence[ChatMessage], variables: Mapping[str, Any], is_open: bool = True
) -> Prompt:
    """Raises:
    RequestError: the model's form or template does not take the messages. Names no file of the server.
    """
    check_chats(model)
    try:
        return chat_prompt(model.tokenizer, messages, is_open, variables)
    except ChatTemplateError as error:
        raise RequestError(400, error.reason, "messages") from None
    except ConfigError as error:
        raise RequestError(400, error.problems[0], "messages") from None


def _tokens(model: ServedModel, prompt: str | tuple[int, ...], suffix: str | None) -> tuple[int, ...]:
    if suffix is not None:
        try:
            return infill_prompt(model.tokenizer, _text(model, prompt), suffix).tokens
        except ConfigError:
            raise RequestError(400, f"{model.name} was not taught to fill gaps", "suffix") from None
    return tuple(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt


def _text(model: ServedModel, prompt: str | tuple[int, ...]) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(list(prompt))
