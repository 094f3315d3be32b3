# SPDX-License-Identifier: Apache-2.0
"""HTTP in front of a `Service`: OpenAI's endpoints, vLLM's tokenizer endpoints, health, metrics and the page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line
from sporeloom.core.log import LogBudget
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.inference.config import language_tags
from sporeloom.serve.access import AccessControl, is_json_type, page_policy
from sporeloom.serve.answers import ChatAnswer, CompletionAnswer
from sporeloom.serve.config import ServedModel, ServeJob
from sporeloom.serve.fields import Fields, RequestError, read_json, shown, token_ids
from sporeloom.serve.hosts import AllowedHosts, AllowedOrigins
from sporeloom.serve.messages import read_messages, read_tools, read_variables
from sporeloom.serve.metrics import Metrics
from sporeloom.serve.prepare import PreparedRequest, chat_tokens, check_chats, prepare_chat, prepare_completion
from sporeloom.serve.requests import BODY_TIMEOUT_S, ApiRequest, log_unknown, read_chat, read_completion
from sporeloom.serve.service import Service
from sporeloom.serve.texts import Events, RequestStream, stream, whole
from sporeloom.serve.token_texts import token_text
from sporeloom.serve.work import Workers, too_many

MAX_BODIES = 64
"""Number of the longest bodies that may be in memory at once; of shorter ones more."""
OPEN_PATHS = ("/", "/health")
"""Paths that need no key."""
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
PAGE_POLICY = page_policy(PAGE)

Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service) -> Starlette:
    """The application of one server."""
    server = Server(service)
    routes = [
        ("/", server.page, "GET"),
        ("/health", server.health, "GET"),
        ("/metrics", server.metrics_text, "GET"),
        ("/v1/models", server.models, "GET"),
        ("/v1/models/{name:path}", server.one_model, "GET"),
        ("/tokenizer_info", server.tokenizer_info, "GET"),
        ("/tokenize", server.tokenize, "POST"),
        ("/detokenize", server.detokenize, "POST"),
        ("/v1/completions", server.completions, "POST"),
        ("/v1/chat/completions", server.chat, "POST"),
    ]
    config = service.job.config
    hosts, origins = AllowedHosts(config.host, config.allowed_hosts), AllowedOrigins(config.allowed_origins)
    app = Starlette(
        routes=[Route(path, server.guarded(handler), methods=[method]) for path, handler, method in routes],
        middleware=[Middleware(AccessControl, hosts=hosts, origins=origins)],
        exception_handlers={HTTPException: _not_here, 500: server.broken},
    )
    app.router.redirect_slashes = False  # to where `Host` says
    return app


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.scope["path"])
    known = {404: f"there is no {path}", 405: f"{path} does not support {request.method}"}
    told = RequestError(error.status_code, known.get(error.status_code, str(error.detail)), headers=error.headers)
    return _error(told)


def _error(error: RequestError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


class Server:
    """The request handlers and their shared state."""

    def __init__(self, service: Service):
        self.service = service
        self.job: ServeJob = service.job
        self.metrics = Metrics(service, self.job.name)
        self.started = int(time.time())
        self._unknown: set[str] = set()
        self._body_bytes = 0
        self._log = LogBudget()
        self._tokenizing = Workers(2, self.job.max_texts)
        self._rendering = Workers(1, self.job.max_texts)  # there is one process for it

    def guarded(self, handler: Handler) -> Handler:
        """Wrap a handler: only clients with the key reach it, and its refusals become answers."""

        async def handle(request: Request) -> Response:
            try:
                self._check_key(request)
                if request.method == "POST" and not is_json_type(request.headers):
                    raise RequestError(415, "send JSON, and say so: `Content-Type: application/json`")
                return await handler(request)
            except RequestError as error:
                return _error(error)
            except ConfigError as error:
                return _error(RequestError(400, error.problems[0]))
            except ClientDisconnect:
                return Response(status_code=499)
            finally:
                self._body_bytes -= getattr(request.state, "body_bytes", 0)

        return handle

    def _check_key(self, request: Request) -> None:
        key = self.job.config.api_key
        if key is None or request.scope["path"] in OPEN_PATHS:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, f"Bearer {key}".encode()):
            headers = {"WWW-Authenticate": "Bearer"}
            raise RequestError(401, "send the key as `Authorization: Bearer KEY`", headers=headers)

    async def broken(self, request: Request, error: Exception) -> Response:
        self._log.log("broken", f"{shown(request.scope['path'])}: {type(error).__name__}: {first_line(error)[:200]}")
        return _error(RequestError(500, "internal error of the server; its log has the details"))

    # What there is

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": PAGE_POLICY})

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

    async def one_model(self, request: Request) -> Response:
        return JSONResponse(self._described(self._named(request.path_params["name"])))

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
        model = self._model(fields)
        workers = self._rendering if fields.values.get("messages") is not None else self._tokenizing
        return await workers.run(self._tokenized, fields, model)

    def _tokenized(self, fields: Fields, model: ServedModel) -> Response:
        text = fields.take("prompt", str)
        if fields.values.get("messages") is not None:
            messages, is_open = read_messages(fields), fields.take("add_generation_prompt", bool, True)
            tools, variables = read_tools(fields), read_variables(fields)
            tokens = list(chat_tokens(model, messages, variables, is_open, tools).tokens)
        elif text is None:
            raise RequestError(400, "prompt is missing", "prompt")
        else:
            tokens = model.tokenizer.encode(text)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self.job.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        fields = await self._fields(request)
        return await self._tokenizing.run(_detokenized, fields, self._model(fields).tokenizer)

    # Texts

    async def completions(self, request: Request) -> Response:
        fields = await self._fields(request)
        model = self._model(fields)
        asked = await self._tokenizing.run(read_completion, fields, model.tokenizer.vocab_size)
        self._check_state(fields, request)
        prepared = await self._tokenizing.run(prepare_completion, self.job, model, asked)
        return await self._answer(request, asked, prepared, CompletionAnswer(model, asked))

    async def chat(self, request: Request) -> Response:
        fields = await self._fields(request)
        model = self._model(fields)
        check_chats(model)
        asked = await self._tokenizing.run(read_chat, fields, model.tokenizer.vocab_size)
        self._check_state(fields, request)
        prepared = await self._rendering.run(prepare_chat, self.job, model, asked)
        return await self._answer(request, asked, prepared, ChatAnswer(model, asked))

    async def _fields(self, request: Request) -> Fields:
        """Read the body, up to the size limit.

        Raises:
            RequestError: it is too long, too slow, or no JSON object.
        """
        limit = self.job.config.max_body_kb * 1024
        too_long = RequestError(413, f"the request is longer than {self.job.config.max_body_kb} KB", headers=_LAST)
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise too_long

        async def read() -> bytes:
            body = bytearray()
            async for part in request.stream():
                body += part
                self._hold(request, len(part))
                if len(body) > limit:
                    raise too_long
            return bytes(body)

        try:
            return await run_in_threadpool(read_json, await asyncio.wait_for(read(), BODY_TIMEOUT_S))
        except asyncio.TimeoutError:
            raise RequestError(
                408, f"the request did not arrive within {BODY_TIMEOUT_S:.0f} s", headers=_LAST
            ) from None

    def _hold(self, request: Request, count: int) -> None:
        """Count bytes of a body, until its request has been answered.

        Raises:
            RequestError: those of all requests are too many.
        """
        if self._body_bytes + count > MAX_BODIES * self.job.config.max_body_kb * 1024:
            raise RequestError(503, "too many long requests; try again later", headers={"Retry-After": "1", **_LAST})
        self._body_bytes += count
        request.state.body_bytes = getattr(request.state, "body_bytes", 0) + count

    def _model(self, fields: Fields) -> ServedModel:
        """Find the model of the request; the checkpoint's where it names none.

        Raises:
            RequestError: there is none of this name.
        """
        name = fields.take("model", str)
        return self.job.models[0] if name is None else self._named(name)

    def _named(self, name: str) -> ServedModel:
        """Raises:
        RequestError: there is none of this name.
        """
        for model in self.job.models:
            if name == model.name:
                return model
        known = ", ".join(repr(model.name) for model in self.job.models)
        raise RequestError(404, f"there is no model {shown(name)} here, but {known}", "model")

    def _check_state(self, fields: Fields, request: Request) -> None:
        log_unknown(fields, request.scope["path"], self._unknown)
        if self.service.state != "ready":
            said = self.service.failure or self.service.progress or "the server is stopping"
            raise RequestError(503, said, headers={"Retry-After": "1"})

    async def _answer(
        self, request: Request, asked: ApiRequest, prepared: PreparedRequest, form: CompletionAnswer | ChatAnswer
    ) -> Response:
        prompts, choices = prepared.prompts, prepared.choices
        if self.service.num_waiting + len(choices) > self.job.max_texts:
            raise too_many("requests wait")
        texts = RequestStream(self.service, self.metrics, form.model, asked, choices, prepared.rooms)
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
        return await self._tokenizing.run(lambda: JSONResponse(form.whole(prompts, choices)))


def _detokenized(fields: Fields, tokenizer: Tokenizer) -> Response:
    given = fields.take("tokens", list)
    if given is None:
        raise RequestError(400, "tokens is missing", "tokens")
    return JSONResponse({"prompt": tokenizer.decode(list(token_ids(given, "tokens", tokenizer.vocab_size)))})


_LAST = {"Connection": "close"}
"""Close answers that are not read to their end."""
_NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
