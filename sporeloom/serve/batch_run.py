# SPDX-License-Identifier: Apache-2.0
"""Answers a batch file: the application of a server is asked within the process, as clients would ask it."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from sporeloom.core.json_text import json_text
from sporeloom.core.log import milestone
from sporeloom.runtime.environment import launched_rank
from sporeloom.serve.app import build_app
from sporeloom.serve.batch import BatchJob, BatchRequest
from sporeloom.serve.service import Service

RETRY_S = 0.05
STOPPING = 503
"""Status of requests that came too late."""
Ask = Callable[[BatchRequest], Awaitable[tuple[int, Any]]]


def run(job: BatchJob) -> int:
    """Answer all requests. Returns the exit code: 1 if one failed."""
    service = Service(job.serving)
    is_writer = launched_rank() == job.serving.strategy.mesh.first_rank_of_last_stage
    writer = Writer(job, app_asker(service)) if is_writer else None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, (lambda *_: service.stop(0.0)) if is_writer else signal.SIG_IGN)
    service.open()
    thread = threading.Thread(target=_write, args=(writer, service), daemon=True) if writer else None
    if thread:
        thread.start()
    service.run()
    if thread and writer:
        thread.join()
        milestone(f"{writer.num_written} answers in {job.output}, {writer.num_failed} of them errors")
        return int(writer.num_failed > 0 or writer.num_written < len(job.waiting))
    return 0


def _write(writer: Writer, service: Service) -> None:
    try:
        asyncio.run(writer.run())
    except OSError as error:
        milestone(f"{writer.job.output}: {error.strerror}")
    finally:
        service.stop(0.0)


def app_asker(service: Service) -> Ask:
    """A function that sends requests to the application of a server, without a connection."""
    app = build_app(service)

    async def ask(request: BatchRequest) -> tuple[int, Any]:
        body = json_text(request.body).encode()
        sent = [{"type": "http.request", "body": body, "more_body": False}]
        parts, status = list[bytes](), 0

        async def receive() -> Any:
            return sent.pop() if sent else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": request.url, "headers": headers, "query_string": b""}
        try:
            await app(
                {**scope, "http_version": "1.1", "scheme": "http", "raw_path": request.url.encode()}, receive, send
            )
        except Exception:  # of this request alone; the application has logged it, and answered with status 500
            if not status:
                raise
        return status, json.loads(b"".join(parts))

    return ask


class Writer:
    """Sends the requests of a batch, as many at once as keep the model busy, and writes the answers in their order."""

    def __init__(self, job: BatchJob, ask: Ask):
        self.job, self._ask = job, ask
        self._gate = asyncio.Semaphore(2 * job.serving.num_rows)
        self.num_written, self.num_failed = 0, 0

    async def run(self) -> None:
        """Raises:
        OSError: the output cannot be written.
        """
        tasks = [asyncio.ensure_future(self._answer(request)) for request in self.job.waiting]
        with self.job.output.open("a", encoding="utf-8") as file:
            for request, task in zip(self.job.waiting, tasks, strict=True):
                status, body = await task
                if status == STOPPING:
                    break
                file.write(json_text(_line(request, status, body)) + "\n")
                file.flush()
                self.num_written += 1
                self.num_failed += status != 200
        for task in tasks:
            task.cancel()

    async def _answer(self, request: BatchRequest) -> tuple[int, Any]:
        async with self._gate:
            while True:
                status, body = await self._ask(request)
                if status != 429:
                    return status, body
                await asyncio.sleep(RETRY_S)  # its choices have no room yet


def _line(request: BatchRequest, status: int, body: Any) -> dict[str, Any]:
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": request.custom_id,
        "response": response,
        "error": None,
    }
