# SPDX-License-Identifier: Apache-2.0
"""Prepare a request before the model runs: tokenize its prompts, and build a request for each of its choices.

All of it takes time that depends on what a client sent: it is for worker threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.data.chat_template import ChatTemplateError
from sporeloom.data.tokenizer import ChatMessage, Prompt, chat_prompt, infill_prompt
from sporeloom.inference.sampling import Processor
from sporeloom.inference.session import Completion, StopConditions
from sporeloom.serve.answer_form import ChatAnswerForm
from sporeloom.serve.answers import Choice
from sporeloom.serve.config import ServedModel, ServeJob
from sporeloom.serve.constraint import TokenMask
from sporeloom.serve.fields import RequestError
from sporeloom.serve.messages import NO_TOOLS, ToolUse
from sporeloom.serve.requests import ApiRequest, ChatRequest, CompletionRequest
from sporeloom.serve.structured import ARGUMENTS, Grammar
from sporeloom.serve.thinking import template_variables


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is valid and tokenized."""

    prompts: list[tuple[int, ...]]
    choices: list[Choice]
    rooms: list[int]
    """Maximum number of new tokens of each choice."""


def prepare_completion(job: ServeJob, model: ServedModel, asked: CompletionRequest) -> PreparedRequest:
    """Raises:
    RequestError: it cannot be done.
    """
    check_count(job, asked, len(asked.prompts))
    stop, prepared = stop_conditions(model, asked), PreparedRequest([], [], [])
    grammars = [] if asked.structure is None else [asked.structure.grammar]
    for prompt in asked.prompts:
        tokens = _tokens(model, prompt, asked.suffix)
        room = room_for(job, tokens, asked)  # before the prompt is made a text again: it may be of any length
        echo = _text(model, prompt) if asked.echo else None
        _add(prepared, tokens, room, stop, asked, echo)
    for choice in prepared.choices:
        choice.processors = masks(model, asked, grammars)
    return prepared


def prepare_chat(job: ServeJob, model: ServedModel, asked: ChatRequest) -> PreparedRequest:
    """Raises:
    RequestError: it cannot be done.
    """
    check_count(job, asked, 1)
    prompt, prepared = chat_request_tokens(model, asked), PreparedRequest([], [], [])
    room, answer = (
        room_for(job, prompt.tokens, asked),
        ChatAnswerForm(model, asked, prompt, stop_conditions(model, asked)),
    )
    _add(prepared, prompt.tokens, room, answer.stop, asked)
    for choice in prepared.choices:
        choice.parser = answer.parser(choice.index)
        choice.processors = (*answer.budget(), *masks(model, asked, answer.grammars, asked.tools))
    return prepared


def masks(
    model: ServedModel, asked: ApiRequest, grammars: Sequence[Grammar], tools: ToolUse = NO_TOOLS
) -> tuple[Processor, ...]:
    """The mask of one text, if its form is demanded.

    Raises:
        RequestError: the demanded form cannot be enforced.
    """
    if not grammars:
        return ()
    try:
        return (TokenMask(model.tokenizer, model.stop_ids, grammars),)
    except ConfigError as error:
        place = _place_of_problem(model, grammars, tools)
        param = "tools" if place.startswith("tools") else asked.structure.param if asked.structure else "tools"
        raise RequestError(400, f"{place or param}: {error.problems[0]}", param) from None


def _place_of_problem(model: ServedModel, grammars: Sequence[Grammar], tools: ToolUse) -> str:
    """Find the function whose parameters cannot be enforced, if it is that."""
    for grammar in grammars:
        name = str(grammar.get("name", ""))
        if not name.startswith(ARGUMENTS):
            continue
        try:
            TokenMask(model.tokenizer, model.stop_ids, [grammar])
        except ConfigError:
            return f"{tools.callable[int(name.removeprefix(ARGUMENTS))][0]}.parameters"
    return ""


def _add(
    prepared: PreparedRequest,
    tokens: tuple[int, ...],
    room: int,
    stop: StopConditions,
    asked: ApiRequest,
    echo: str | None = None,
) -> None:
    prepared.prompts.append(tokens)
    for _ in range(asked.num_choices):
        prepared.choices.append(Choice(len(prepared.choices), tokens, stop, Completion(""), echo))
        prepared.rooms.append(room)


def check_count(job: ServeJob, asked: ApiRequest, num_prompts: int) -> None:
    """Raises:
    RequestError: more texts than the server ever accepts; trying again later would not help.
    """
    texts, most = asked.num_choices * num_prompts, job.max_texts
    if texts > most:
        raise RequestError(
            400,
            f"n: {asked.num_choices} choices of {num_prompts} prompts are {texts} texts, and this server "
            f"accepts at most {most} ({job.config.max_queue} waiting and {job.num_rows} running); send several "
            "requests",
            "n",
        )


def stop_conditions(model: ServedModel, asked: ApiRequest) -> StopConditions:
    """Raises:
    RequestError: no token would be left to choose.
    """
    stop_ids = (() if asked.ignore_eos else model.stop_ids) + asked.stop_ids
    if asked.sampling.leaves_none(stop_ids, model.tokenizer.vocab_size):
        raise RequestError(400, "min_tokens and stop_token_ids leave no token to choose", "min_tokens")
    return StopConditions(model.tokenizer, stop_ids, asked.stop)


def room_for(job: ServeJob, prompt: tuple[int, ...], asked: ApiRequest) -> int:
    """Maximum number of new tokens.

    Raises:
        RequestError: the context has no room for as many as requested.
    """
    most, room = job.max_model_len, job.max_model_len - len(prompt)
    if not prompt:
        raise RequestError(400, "the prompt contains no token", "prompt")
    if room < (1 if asked.max_tokens is None else asked.max_tokens):
        wanted = "" if asked.max_tokens is None else f", and up to {asked.max_tokens} more are requested"
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
    if model.tokenizer.chat is None:
        raise RequestError(
            400, f"{model.name} is a base model: it has no chat template. Use /v1/completions", "messages"
        )


def chat_request_tokens(model: ServedModel, asked: ChatRequest) -> Prompt:
    """Raises:
    RequestError: as `chat_tokens`, or the model's chat template does not do what the request demands.
    """
    check_chats(model)
    variables = template_variables(model, asked.variables, asked.reasoning_effort)
    return chat_tokens(model, asked.messages, variables, tools=asked.tools)


def check_tools(model: ServedModel, tools: ToolUse) -> None:
    """Raises:
    RequestError: the model's chat template has no tools, or the format of its calls is not known.
    """
    if not tools.offered:
        return
    template = model.tokenizer.template
    if template is None or not template.reads("tools"):
        raise RequestError(400, f"the chat template of {model.name} has no tools; leave tools out", "tools")
    if model.form.calls is None:
        raise RequestError(
            400,
            f"the format of the tool calls of {model.name} is not known: start the server with --tool-call-parser",
            "tools",
        )


def chat_tokens(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    variables: Mapping[str, Any],
    is_open: bool = True,
    tools: ToolUse = NO_TOOLS,
) -> Prompt:
    """Raises:
    RequestError: the model's form or template does not take the messages. Names no file of the server.
    """
    check_chats(model)
    check_tools(model, tools)
    try:
        return chat_prompt(model.tokenizer, messages, is_open, variables, tools.offered)
    except ChatTemplateError as error:
        raise RequestError(400, error.reason, "messages") from None
    except ConfigError as error:
        raise RequestError(400, error.problems[0], "messages") from None


def _tokens(model: ServedModel, prompt: str | tuple[int, ...], suffix: str | None) -> tuple[int, ...]:
    if suffix is not None:
        try:
            return infill_prompt(model.tokenizer, _text(model, prompt), suffix).tokens
        except ConfigError:
            raise RequestError(400, f"{model.name} was not trained to fill in the middle", "suffix") from None
    return tuple(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt


def _text(model: ServedModel, prompt: str | tuple[int, ...]) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(list(prompt))
