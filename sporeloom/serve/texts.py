# SPDX-License-Identifier: Apache-2.0
"""The texts of one request: submitted to the service, returned as one answer or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from sporeloom.inference.requests import Event, Failure, NewToken, PromptScores
from sporeloom.inference.sampling import GrammarError, NoTokenError
from sporeloom.serve.adapter_slots import ModelGoneError
from sporeloom.serve.answers import Answer, Choice
from sporeloom.serve.config import ServedModel
from sporeloom.serve.fields import RequestError
from sporeloom.serve.generation import GenerationRequest
from sporeloom.serve.metrics import Metrics, Timing
from sporeloom.serve.requests import ApiRequest
from sporeloom.serve.service import Service, ServiceFailure

Result = TypeVar("Result")

MAX_SCORES = 64
"""Maximum number of tokens whose log-probabilities are formatted on the event loop; a prompt may have thousands."""


class RequestStream:
    """The texts of one request, submitted on start and cancelled when the client is gone."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        model: ServedModel,
        asked: ApiRequest,
        choices: list[Choice],
        rooms: list[int],
        client: int = 0,
    ):
        self.service, self.metrics, self.model, self.asked = service, metrics, model, asked
        self.choices, self.rooms, self.timeout_s = choices, rooms, service.job.config.request_timeout
        self.client, self.timings = client, {choice.index: Timing() for choice in choices}

    async def events(self) -> AsyncGenerator[tuple[Choice, str], None]:
        """Yield a choice that has events, and its new text, until all have ended.

        Raises:
            RequestError: there is no answer, or none in time.
        """
        came: asyncio.Queue[tuple[Choice, Event | ServiceFailure] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        notify = partial(notify_on, loop, came)
        tickets: dict[int, int] = {}
        timings = self.timings
        # Not asyncio.wait_for: before Python 3.12 it may lose that its caller was cancelled.
        too_late = loop.call_later(self.timeout_s, came.put_nowait, None)
        reason = "abort"
        try:
            for choice, room in zip(self.choices, self.rooms, strict=True):
                self.metrics.asked(len(choice.prompt), self.asked.num_choices, room)
                if choice.echo is not None:
                    yield choice, choice.echo
                if wanted := self._wanted(choice, room):
                    tickets[choice.index] = self.service.submit(wanted, partial(notify, choice))
                else:
                    choice.finish_reason = "length"
                    yield choice, ""
            while tickets:
                if (news := await came.get()) is None:
                    raise RequestError(504, f"not done within {self.timeout_s:g} s")
                choice, event = news
                yield choice, self._take(choice, event, timings[choice.index])
                if choice.finish_reason:
                    self.metrics.end(timings[choice.index], choice.finish_reason)
                    del tickets[choice.index]
        except RequestError:
            reason = "error"
            raise
        finally:
            too_late.cancel()
            for index, ticket in tickets.items():
                self.service.cancel(ticket)
                self.metrics.end(timings[index], reason)

    def _wanted(self, choice: Choice, room: int) -> GenerationRequest | None:
        is_echoed = choice.echo is not None and self.asked.num_top is not None
        score_prompt = is_echoed or self.asked.prompt_top is not None
        if score_prompt:
            choice.prompt_scores = [None]  # of the first token
        if is_echoed:
            choice.scores.append(None)
        if not room and not (score_prompt and len(choice.prompt) > 1):
            return None
        return GenerationRequest(
            prompt=tuple(choice.prompt),
            adapter=self.model.adapter,
            max_new_tokens=room,
            sampling=self.asked.sampling,
            stream=choice.index % self.asked.num_choices,
            stop_ids=tuple(choice.stop.stop_ids),
            logit_bias=self.asked.logit_bias,
            num_top=max(self.asked.num_top or 0, self.asked.prompt_top or 0),
            has_scores=self.asked.has_scores,
            score_prompt=score_prompt,
            is_finished=choice.stop.watch(),
            processors=choice.processors,
            cache_salt=self.asked.cache_salt,
            priority=self.asked.priority,
            client=self.client,
        )

    def _take(self, choice: Choice, event: Event | ServiceFailure, timing: Timing) -> str:
        """Process events. Returns the new text."""
        if isinstance(event, NewToken):
            self.metrics.token(timing, event)
            return choice.add(event)
        if isinstance(event, PromptScores):
            choice.prompt_scores += event.scores
            if choice.scores:  # they are part of the answer
                choice.scores += event.scores
            choice.finish_reason = event.finish_reason
            return ""
        raise failed(event)


def failed(event: Event | ServiceFailure) -> RequestError:
    """The answer to a request of which a text has failed."""
    if isinstance(event, ServiceFailure):
        return RequestError(503, event.reason)
    assert isinstance(event, Failure), event
    return RequestError(_status(event.error), str(event.error))


def _status(error: Exception) -> int:
    if isinstance(error, ModelGoneError):
        return 404
    return 400 if isinstance(error, NoTokenError | GrammarError) else 500


def notify_on(
    loop: asyncio.AbstractEventLoop, came: asyncio.Queue[Any], choice: Any, event: Event | ServiceFailure
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody listens
        loop.call_soon_threadsafe(came.put_nowait, (choice, event))


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work of a request, and give it up when its client is gone.

    Raises:
        ClientDisconnect: it is.
    """
    made = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((made, gone), return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            raise ClientDisconnect
        return made.result()
    finally:
        gone.cancel()
        made.cancel()
        with contextlib.suppress(asyncio.CancelledError, RequestError):
            await made


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def whole(texts: RequestStream) -> None:
    async with contextlib.aclosing(texts.events()) as events:
        async for _ in events:
            pass


class Events(StreamingResponse):
    """A stream that closes its source when its client disconnects, also between two events."""

    body_iterator: AsyncGenerator[str, None]

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(self.body_iterator):
            await super().stream_response(send)


async def stream(texts: RequestStream, form: Answer, prompts: list[tuple[int, ...]]) -> AsyncGenerator[str, None]:
    """Server-sent events, one a token or more."""
    try:
        for first in form.opening(prompts, texts.choices):
            yield form.event(first)
        async with contextlib.aclosing(texts.events()) as events:
            async for choice, text in events:
                is_long = len(choice.scores) - choice.num_sent > MAX_SCORES
                parts = await run_in_threadpool(form.parts, choice, text) if is_long else form.parts(choice, text)
                for part in parts:
                    yield form.event(part)
        for last in form.closing(prompts, texts.choices):
            yield form.event(last)
    except RequestError as error:
        for last in form.failure(error):
            yield form.event(last)
    if form.end:
        yield form.end
