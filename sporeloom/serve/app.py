# SPDX-License-Identifier: Apache-2.0
"""HTTP in front of a `Service`: OpenAI's endpoints, vLLM's tokenizer endpoints, health, metrics and the page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sporeloom.data.tokenizer import ChatMessage, Prompt, chat_prompt, infill_prompt
from sporeloom.errors import ConfigError
from sporeloom.inference.config import language_tags
from sporeloom.inference.session import Completion, StopConditions
from sporeloom.log import milestone
from sporeloom.serve.answers import ChatAnswer, Choice, CompletionAnswer
from sporeloom.serve.config import ServedModel, ServeJob
from sporeloom.serve.metrics import Metrics
from sporeloom.serve.requests import (
    Asked,
    Fields,
    RequestError,
    log_unknown,
    read_chat,
    read_completion,
    read_json,
    read_messages,
    read_variables,
    token_ids,
)
from sporeloom.serve.service import Service
from sporeloom.serve.texts import Events, Texts, stream, whole
from sporeloom.serve.token_texts import token_text

BODY_TIMEOUT_S = 30.0
OPEN_PATHS = ("/", "/health")
"""What needs no key."""
PAGE = Path(__file__).with_name("page.html")
HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service) -> Starlette:
    """The application of one server."""
    server = Server(service)
    routes = [
        ("/", server.page, "GET"),
        ("/health", server.health, "GET"),
        ("/metrics", server.metrics_text, "GET"),
        ("/v1/models", server.models, "GET"),
        ("/tokenizer_info", server.tokenizer_info, "GET"),
        ("/tokenize", server.tokenize, "POST"),
        ("/detokenize", server.detokenize, "POST"),
        ("/v1/completions", server.completions, "POST"),
        ("/v1/chat/completions", server.chat, "POST"),
    ]
    return Starlette(
        routes=[Route(path, server.guarded(handler), methods=[method]) for path, handler, method in routes],
        exception_handlers={HTTPException: _not_here, 500: _broken},
    )


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: f"there is no {request.url.path}", 405: f"{request.method} does not go with {request.url.path}"}
    told = RequestError(error.status_code, known.get(error.status_code, str(error.detail)), headers=error.headers)
    return _error(told)


async def _broken(request: Request, error: Exception) -> Response:
    milestone(f"{request.url.path}: {type(error).__name__}: {error}")
    return _error(RequestError(500, "the server made a mistake; its log says which"))


def _error(error: RequestError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


class Server:
    """The handlers, and what they share."""

    def __init__(self, service: Service):
        self.service = service
        self.job: ServeJob = service.job
        self.metrics = Metrics(service, self.job.name)
        self.started = int(time.time())
        self._unknown: set[str] = set()

    def guarded(self, handler: Handler) -> Handler:
        """A handler that only those with the key reach, and whose refusals are answers."""

        async def handle(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except RequestError as error:
                return _error(error)
            except ConfigError as error:
                return _error(RequestError(400, error.problems[0]))
            except ClientDisconnect:
                return Response(status_code=499)

        return handle

    def _check_key(self, request: Request) -> None:
        key = self.job.config.api_key
        if key is None or request.url.path in OPEN_PATHS:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, f"Bearer {key}".encode()):
            headers = {"WWW-Authenticate": "Bearer"}
            raise RequestError(401, "send the key as `Authorization: Bearer KEY`", headers=headers)

    # What there is

    async def page(self, request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(PAGE.read_text, encoding="utf-8"), headers=HEADERS)

    async def health(self, request: Request) -> Response:
        if self.service.state == "ready":
            return JSONResponse({"status": "ok"})
        said = self.service.failure or self.service.progress or self.service.state
        error = {"message": said, "type": "unavailable_error", "param": None, "code": 503}
        return JSONResponse({"status": self.service.state, "error": error}, 503, {"Retry-After": "1"})

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(model) for model in self.job.models]})

    def _described(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self.started,
            "owned_by": "sporeloom",
            "root": model.name,
            "parent": self.job.name if model.adapter else None,
            "max_model_len": self.job.max_model_len,
            "permission": [],
            "abilities": {
                "chat": hasattr(model.tokenizer, "chat"),
                "infill": hasattr(model.tokenizer, "infill"),
                "languages": language_tags(self.job.family),
            },
        }

    async def tokenizer_info(self, request: Request) -> Response:
        tokenizer = self.job.models[0].tokenizer
        eos = token_text(tokenizer, tokenizer.eod_id)
        return JSONResponse({"tokenizer_class": type(tokenizer).__name__, "eos_token": eos, "bos_token": None})

    async def tokenize(self, request: Request) -> Response:
        fields = await self._fields(request)
        model, text = self._model(fields), fields.take("prompt", str)
        if fields.values.get("messages") is not None:
            messages, is_open = read_messages(fields), fields.take("add_generation_prompt", bool, True)
            tokens = list((await self._chat_prompt(model, messages, read_variables(fields), is_open)).tokens)
        elif text is None:
            raise RequestError(400, "prompt is missing", "prompt")
        else:
            tokens = await run_in_threadpool(model.tokenizer.encode, text)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self.job.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        fields = await self._fields(request)
        tokenizer, given = self._model(fields).tokenizer, fields.take("tokens", list)
        if given is None:
            raise RequestError(400, "tokens is missing", "tokens")
        tokens = token_ids(given, "tokens", tokenizer.vocab_size)
        return JSONResponse({"prompt": await run_in_threadpool(tokenizer.decode, list(tokens))})

    # Texts

    async def completions(self, request: Request) -> Response:
        fields = await self._fields(request)
        model = self._model(fields)
        asked = read_completion(fields, model.tokenizer.vocab_size)
        self._check_state(fields, request)
        stop = self._stop(model, asked)
        prompts = [await run_in_threadpool(_prompt, model, prompt, asked.suffix) for prompt in asked.prompts]
        choices = [
            Choice(
                index=number * asked.num_choices + choice,
                prompt=prompt,
                stop=stop,
                completion=Completion(""),
                echo=_text(model, asked.prompts[number]) if asked.echo else None,
            )
            for number, prompt in enumerate(prompts)
            for choice in range(asked.num_choices)
        ]
        return await self._answer(request, asked, prompts, choices, CompletionAnswer(model, asked))

    async def chat(self, request: Request) -> Response:
        fields = await self._fields(request)
        model = self._model(fields)
        _check_chats(model)
        asked = read_chat(fields, model.tokenizer.vocab_size)
        self._check_state(fields, request)
        stop = self._stop(model, asked)
        prompt = (await self._chat_prompt(model, asked.messages, asked.variables)).tokens
        choices = [Choice(index, prompt, stop, Completion("")) for index in range(asked.num_choices)]
        return await self._answer(request, asked, [prompt], choices, ChatAnswer(model, asked))

    async def _chat_prompt(
        self, model: ServedModel, messages: Sequence[ChatMessage], variables: Mapping[str, Any], is_open: bool = True
    ) -> Prompt:
        """Not on the event loop: a chat template may take its time."""
        _check_chats(model)
        try:
            return await run_in_threadpool(chat_prompt, model.tokenizer, messages, is_open, variables)
        except ConfigError as error:
            raise RequestError(400, error.problems[0], "messages") from None

    async def _fields(self, request: Request) -> Fields:
        """The body, as far as it may go.

        Raises:
            RequestError: it is too long, too slow, or no JSON object.
        """
        limit = self.job.config.max_body_kb * 1024
        too_long = RequestError(413, f"the request is longer than {self.job.config.max_body_kb} KB")
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise too_long

        async def read() -> bytes:
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_long
            return bytes(body)

        try:
            return await run_in_threadpool(read_json, await asyncio.wait_for(read(), BODY_TIMEOUT_S))
        except asyncio.TimeoutError:
            raise RequestError(408, f"the request did not arrive within {BODY_TIMEOUT_S:.0f} s") from None

    def _model(self, fields: Fields) -> ServedModel:
        """The model that is asked for; the checkpoint's where none is.

        Raises:
            RequestError: there is none of this name.
        """
        name = fields.take("model", str)
        for model in self.job.models:
            if name in (None, model.name):
                return model
        known = ", ".join(repr(model.name) for model in self.job.models)
        raise RequestError(404, f"there is no model {name!r} here, but {known}", "model")

    def _check_state(self, fields: Fields, request: Request) -> None:
        log_unknown(fields, request.url.path, self._unknown)
        if self.service.state != "ready":
            said = self.service.failure or self.service.progress or "the server is stopping"
            raise RequestError(503, said, headers={"Retry-After": "1"})

    def _stop(self, model: ServedModel, asked: Asked) -> StopConditions:
        """Raises:
        RequestError: no token would be left to choose.
        """
        stop_ids = (() if asked.ignore_eos else model.stop_ids) + asked.stop_ids
        if asked.sampling.leaves_none(stop_ids, model.tokenizer.vocab_size):
            raise RequestError(400, "min_tokens and stop_token_ids leave no token to choose", "min_tokens")
        return StopConditions(model.tokenizer, stop_ids, asked.stop)

    def _room(self, prompt: tuple[int, ...], asked: Asked) -> int:
        """Tokens that may be made.

        Raises:
            RequestError: there is no room for as many as are asked for.
        """
        most, room = self.job.max_model_len, self.job.max_model_len - len(prompt)
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

    async def _answer(
        self,
        request: Request,
        asked: Asked,
        prompts: list[tuple[int, ...]],
        choices: list[Choice],
        form: CompletionAnswer | ChatAnswer,
    ) -> Response:
        rooms = [self._room(tuple(choice.prompt), asked) for choice in choices]
        if self.service.num_waiting + len(choices) > self.job.config.max_queue + self.job.num_rows:
            raise RequestError(429, "too many requests wait; come again later", headers={"Retry-After": "1"})
        texts = Texts(self.service, self.metrics, form.model, asked, choices, rooms)
        if asked.stream:
            return Events(stream(texts, form, prompts), media_type="text/event-stream", headers=_NO_BUFFER)
        made = asyncio.ensure_future(whole(texts))
        gone = asyncio.ensure_future(_until_gone(request))
        try:
            await asyncio.wait((made, gone), return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                raise ClientDisconnect
            made.result()
        finally:
            gone.cancel()
            made.cancel()
            with contextlib.suppress(asyncio.CancelledError, RequestError):
                await made
        return JSONResponse(form.whole(prompts, choices))


def _check_chats(model: ServedModel) -> None:
    if not hasattr(model.tokenizer, "chat"):
        raise RequestError(
            400, f"{model.name} is a base model: it has no chat template. Use /v1/completions", "messages"
        )


def _prompt(model: ServedModel, prompt: str | tuple[int, ...], suffix: str | None) -> tuple[int, ...]:
    if suffix is not None:
        try:
            return infill_prompt(model.tokenizer, _text(model, prompt), suffix).tokens
        except ConfigError:
            raise RequestError(400, f"{model.name} was not taught to fill gaps", "suffix") from None
    return tuple(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt


def _text(model: ServedModel, prompt: str | tuple[int, ...]) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(list(prompt))


_NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
