# SPDX-License-Identifier: Apache-2.0
"""Structured logs: a line of JSON on stdout for each request, without what it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sporeloom.core.json_text import json_text
from sporeloom.serve.texts import RequestStream

MAX_PATH = 200
QUIET = ("/live", "/ready", "/health", "/metrics")
"""Paths that are asked all the time by monitors, logged only where they fail."""


class RequestLog:
    """Middleware that logs each request once it is answered, a stream at its end."""

    def __init__(self, app: ASGIApp, write: Callable[[str], None]):
        self.app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.perf_counter(), 0
        state = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:  # the server answers it outside of this middleware
            status = status or 500
            raise
        finally:
            path = _route(scope)
            if not (path in QUIET and status == 200):
                told = {
                    "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                    "method": scope["method"],
                    "path": path[:MAX_PATH],
                    "status": status,
                    "seconds": round(time.perf_counter() - began, 6),
                    "client": state.get("client"),
                    **_of_texts(state.get("texts")),
                }
                self._write(json_text(told))


def _route(scope: Scope) -> str:
    """The path with the names of its parameters, not their values: the id of a stored response is nobody else's business."""
    path: str = scope["path"]
    for name, value in scope.get("path_params", {}).items():  # each path has one at most, at its end
        path = path.removesuffix(value) + f"{{{name}}}"
    return path


def _of_texts(texts: RequestStream | None) -> dict[str, Any]:
    """Model, counts and times of a request that was generated for."""
    if texts is None:
        return {}
    first = [timing.first - timing.started for timing in texts.timings.values() if timing.first is not None]
    prompts = {id(choice.prompt): len(choice.prompt) for choice in texts.choices}
    return {
        "model": texts.model.name,
        "stream": texts.asked.stream,
        "seed": texts.asked.seed,
        "prompt_tokens": sum(prompts.values()),
        "completion_tokens": sum(len(choice.completion.tokens) for choice in texts.choices),
        "finish_reasons": [choice.finish_reason for choice in texts.choices],
        "time_to_first_token_s": round(min(first), 6) if first else None,
    }
