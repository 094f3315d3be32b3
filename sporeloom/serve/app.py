# SPDX-License-Identifier: Apache-2.0
"""HTTP in front of a `Service`: OpenAI's endpoints, vLLM's tokenizer endpoints, health, metrics and the page."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line
from sporeloom.core.log import LogBudget
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.inference.config import language_tags
from sporeloom.serve.access import AccessControl, is_json_type, page_policy
from sporeloom.serve.answers import Answer, ChatAnswer, CompletionAnswer
from sporeloom.serve.anthropic.answer import MessagesAnswer, error_body
from sporeloom.serve.anthropic.request import NAMES as MESSAGES_NAMES
from sporeloom.serve.anthropic.request import PATH as MESSAGES_PATH
from sporeloom.serve.anthropic.request import read_message_request
from sporeloom.serve.bodies import Bodies
from sporeloom.serve.config import ServedModel, ServeJob
from sporeloom.serve.embeddings import Embedded, embed, read_embeddings, read_rerank
from sporeloom.serve.fields import Fields, RequestError, shown, token_ids
from sporeloom.serve.hosts import AllowedHosts, AllowedOrigins
from sporeloom.serve.json_response import JsonResponse
from sporeloom.serve.messages import read_messages, read_tools, read_variables
from sporeloom.serve.metrics import Metrics
from sporeloom.serve.prepare import (
    PreparedRequest,
    chat_request_tokens,
    chat_tokens,
    check_chats,
    prepare_chat,
    prepare_completion,
)
from sporeloom.serve.request_log import RequestLog
from sporeloom.serve.requests import ApiRequest, ChatRequest, log_unknown, read_chat, read_completion
from sporeloom.serve.responses.answer import ResponsesAnswer
from sporeloom.serve.responses.request import NAMES as RESPONSES_NAMES
from sporeloom.serve.responses.request import read_response_request
from sporeloom.serve.responses.store import ResponseStore
from sporeloom.serve.runtime_adapters import RuntimeAdapters
from sporeloom.serve.service import Service
from sporeloom.serve.texts import Events, RequestStream, stream, unless_gone, whole
from sporeloom.serve.token_texts import token_text
from sporeloom.serve.translation import renamed
from sporeloom.serve.work import Workers, too_many

OPEN_PATHS = ("/", "/health", "/live", "/ready")
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
        ("/live", server.live, "GET"),
        ("/ready", server.health, "GET"),
        ("/metrics", server.metrics_text, "GET"),
        ("/v1/models", server.models, "GET"),
        ("/v1/models/{name:path}", server.one_model, "GET"),
        ("/v1/load_lora_adapter", server.load_adapter, "POST"),
        ("/v1/unload_lora_adapter", server.unload_adapter, "POST"),
        ("/v1/embeddings", server.embeddings, "POST"),
        ("/rerank", server.rerank, "POST"),
        ("/v1/rerank", server.rerank, "POST"),
        ("/v2/rerank", server.rerank, "POST"),
        ("/tokenizer_info", server.tokenizer_info, "GET"),
        ("/tokenize", server.tokenize, "POST"),
        ("/detokenize", server.detokenize, "POST"),
        ("/v1/completions", server.completions, "POST"),
        ("/v1/chat/completions", server.chat, "POST"),
        ("/v1/responses", server.responses, "POST"),
        ("/v1/responses/{name}", server.one_response, "GET"),
        ("/v1/responses/{name}", server.delete_response, "DELETE"),
        ("/v1/messages", server.messages, "POST"),
        ("/v1/messages/count_tokens", server.count_tokens, "POST"),
    ]
    config = service.job.config
    hosts, origins = AllowedHosts(config.host, config.allowed_hosts), AllowedOrigins(config.allowed_origins)
    log = [Middleware(RequestLog, write=_print)] if config.log_format == "json" else []
    app = Starlette(
        routes=[Route(path, server.guarded(handler), methods=[method]) for path, handler, method in routes],
        middleware=[*log, Middleware(AccessControl, hosts=hosts, origins=origins)],
        exception_handlers={HTTPException: _not_here, 500: server.broken},
    )
    app.router.redirect_slashes = False  # to where `Host` says
    return app


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(line, flush=True)


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.scope["path"])
    known = {404: f"there is no {path}", 405: f"{path} does not support {request.method}"}
    told = RequestError(error.status_code, known.get(error.status_code, str(error.detail)), headers=error.headers)
    return _error(request, told)


def _error(request: Request, error: RequestError) -> Response:
    """An error in the form of the API that was asked."""
    is_anthropic = request.scope["path"].startswith(MESSAGES_PATH)
    return JsonResponse(error_body(error) if is_anthropic else error.body, error.status, error.headers)


class Server:
    """The request handlers and their shared state."""

    def __init__(self, service: Service):
        self.service = service
        self.job: ServeJob = service.job
        self.metrics = Metrics(service, self.job.name)
        self.started = int(time.time())
        self.store = ResponseStore(self.job.config.response_store_mb * 2**20)
        self._unknown: set[str] = set()
        self.adapters = RuntimeAdapters(service)
        self.bodies = Bodies(self.job.config.max_body_kb)
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
                return _error(request, error)
            except ConfigError as error:
                return _error(request, RequestError(400, error.problems[0]))
            except ClientDisconnect:
                return Response(status_code=499)
            finally:
                self.bodies.release(request)

        return handle

    def _check_key(self, request: Request) -> None:
        """Note the number of the client's key in `request.state.client`.

        Raises:
            RequestError: it sends none of the keys.
        """
        keys = self.job.api_keys
        request.state.client = None if keys else 0
        if not keys or request.scope["path"] in OPEN_PATHS:
            return
        given = request.headers.get("authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
        same = [hmac.compare_digest(given.encode("latin-1"), f"Bearer {key}".encode()) for key in keys]
        if not any(same):
            headers = {"WWW-Authenticate": "Bearer"}
            raise RequestError(401, "send the key as `Authorization: Bearer KEY` or `x-api-key: KEY`", headers=headers)
        request.state.client = same.index(True)

    async def broken(self, request: Request, error: Exception) -> Response:
        self._log.log("broken", f"{shown(request.scope['path'])}: {type(error).__name__}: {first_line(error)[:200]}")
        return _error(request, RequestError(500, "internal error of the server; its log has the details"))

    # What there is

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        if self.service.state == "ready":
            return JsonResponse({"status": "ok"})
        said = self.service.failure or self.service.progress or self.service.state
        error = {"message": said, "type": "unavailable_error", "param": None, "code": 503}
        return JsonResponse({"status": self.service.state, "error": error}, 503, {"Retry-After": "1"})

    async def live(self, request: Request) -> Response:
        """Answer whether the process works, also while it loads; if not, it should be started anew."""
        status = 503 if self.service.state == "failed" else 200
        return JsonResponse({"status": self.service.state}, status)

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._described(model) for model in self.adapters.models]})

    async def one_model(self, request: Request) -> Response:
        return JsonResponse(self._described(self._named(request.path_params["name"])))

    async def load_adapter(self, request: Request) -> Response:
        return PlainTextResponse(await self.adapters.load(await self.bodies.read(request)))

    async def unload_adapter(self, request: Request) -> Response:
        return PlainTextResponse(await self.adapters.unload(await self.bodies.read(request)))

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
                "chat": model.tokenizer.chat is not None,
                "infill": model.tokenizer.infill is not None,
                "languages": language_tags(self.job.family),
            },
        }

    async def tokenizer_info(self, request: Request) -> Response:
        tokenizer = self.job.models[0].tokenizer
        eos = token_text(tokenizer, tokenizer.eod_id)
        return JsonResponse({"tokenizer_class": type(tokenizer).__name__, "eos_token": eos, "bos_token": None})

    async def tokenize(self, request: Request) -> Response:
        fields = await self.bodies.read(request)
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
        return JsonResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self.job.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        fields = await self.bodies.read(request)
        return await self._tokenizing.run(_detokenized, fields, self._model(fields).tokenizer)

    # Texts

    async def completions(self, request: Request) -> Response:
        fields = await self.bodies.read(request)
        model = self._model(fields)
        asked = await self._tokenizing.run(read_completion, fields, model.tokenizer.vocab_size)
        self._check_state(fields, request)
        prepared = await self._tokenizing.run(prepare_completion, self.job, model, asked)
        return await self._answer(request, asked, prepared, CompletionAnswer(model, asked))

    async def embeddings(self, request: Request) -> Response:
        return await self._embed(request, read_embeddings)

    async def rerank(self, request: Request) -> Response:
        return await self._embed(request, read_rerank)

    async def _embed(self, request: Request, read: Callable[[Fields, ServedModel, ServeJob], Embedded]) -> Response:
        fields = await self.bodies.read(request)
        model = self._model(fields)
        asked = await self._tokenizing.run(read, fields, model, self.job)
        self._check_state(fields, request)
        client, most = request.state.client, self.job.num_rows
        self._check_queue(client, min(most, len(asked.prompts)))
        made = embed(self.service, self.metrics, model, asked, client, most)
        vectors = await unless_gone(request, made)
        return await self._tokenizing.run(lambda: JsonResponse(asked.answer(model.name, vectors)))

    async def chat(self, request: Request) -> Response:
        return await self._converse(request, _read_chat, ChatAnswer)

    async def responses(self, request: Request) -> Response:
        read = partial(read_response_request, store=self.store, client=request.state.client)
        return await self._converse(request, read, partial(ResponsesAnswer, store=self.store), RESPONSES_NAMES)

    async def messages(self, request: Request) -> Response:
        return await self._converse(request, read_message_request, MessagesAnswer, MESSAGES_NAMES)

    async def _converse(
        self,
        request: Request,
        read: Callable[[Fields, ServedModel], Any],
        answer: Callable[[ServedModel, Any], Answer],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> Response:
        """Answer a conversation in the shapes of one API. `names`: its names of the fields, for errors."""
        asked, model, fields = await self._conversation(request, read, names)
        self._check_state(fields, request)
        with renamed(names):
            prepared = await self._rendering.run(prepare_chat, self.job, model, asked)
        return await self._answer(request, asked, prepared, answer(model, asked))

    async def _conversation(
        self, request: Request, read: Callable[[Fields, ServedModel], Any], names: Mapping[str, str]
    ) -> tuple[Any, ServedModel, Fields]:
        fields = await self.bodies.read(request)
        model = self._model(fields)
        with renamed(names):
            check_chats(model)
        return await self._tokenizing.run(read, fields, model), model, fields

    async def count_tokens(self, request: Request) -> Response:
        read = partial(read_message_request, with_answer=False)
        asked, model, _ = await self._conversation(request, read, MESSAGES_NAMES)
        with renamed(MESSAGES_NAMES):
            prompt = await self._rendering.run(chat_request_tokens, model, asked)
        return JsonResponse({"input_tokens": len(prompt.tokens)})

    async def one_response(self, request: Request) -> Response:
        if request.query_params:
            raise RequestError(400, "a stored response is returned complete: send no parameters")
        return JsonResponse(self.store.get(request.path_params["name"], request.state.client).body)

    async def delete_response(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.store.delete(name, request.state.client)
        return JsonResponse({"id": name, "object": "response", "deleted": True})

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
        for model in self.adapters.models:
            if name == model.name:
                return model
        known = ", ".join(repr(model.name) for model in self.adapters.models)
        raise RequestError(404, f"there is no model {shown(name)} here, but {known}", "model")

    def _check_state(self, fields: Fields, request: Request) -> None:
        log_unknown(fields, request.scope["path"], self._unknown)
        if self.service.state != "ready":
            said = self.service.failure or self.service.progress or "the server is stopping"
            raise RequestError(503, said, headers={"Retry-After": "1"})

    def _check_queue(self, client: int, count: int) -> None:
        """Raises:
        RequestError: no room for so many texts; of several clients that wait each has an equal part of the queue.
        """
        waiting, most = self.service.num_waiting, self.job.max_texts
        if len(self.job.api_keys) > 1:
            by_client = self.service.waiting_clients()
            waiting, most = by_client.get(client, 0), max(1, most // len({client, *by_client}))
        if waiting + count > most:
            raise too_many("requests wait")

    async def _answer(self, request: Request, asked: ApiRequest, prepared: PreparedRequest, form: Answer) -> Response:
        prompts, choices = prepared.prompts, prepared.choices
        self._check_queue(request.state.client, len(choices))
        request.state.texts = texts = RequestStream(
            self.service, self.metrics, form.model, asked, choices, prepared.rooms, request.state.client
        )
        if asked.stream:
            return Events(stream(texts, form, prompts), media_type="text/event-stream", headers=_NO_BUFFER)
        await unless_gone(request, whole(texts))
        return await self._tokenizing.run(lambda: JsonResponse(form.whole(prompts, choices)))


def _read_chat(fields: Fields, model: ServedModel) -> ChatRequest:
    return read_chat(fields, model.tokenizer.vocab_size)


def _detokenized(fields: Fields, tokenizer: Tokenizer) -> Response:
    given = fields.take("tokens", list)
    if given is None:
        raise RequestError(400, "tokens is missing", "tokens")
    return JsonResponse({"prompt": tokenizer.decode(list(token_ids(given, "tokens", tokenizer.vocab_size)))})


_NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
