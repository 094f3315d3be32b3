# SPDX-License-Identifier: Apache-2.0
"""One process of a server: the loop of the model, and on one rank the HTTP server in a thread."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from typing import Any

import uvicorn

from sporeloom.core.locks import one_writer
from sporeloom.core.log import milestone
from sporeloom.runtime.environment import launched_rank
from sporeloom.serve.app import build_app
from sporeloom.serve.config import ServeJob
from sporeloom.serve.connections import KEEP_ALIVE_S, MAX_IDLE, HttpServer, TimedProtocol
from sporeloom.serve.constraint import vocabulary
from sporeloom.serve.listening import listen
from sporeloom.serve.service import Service

SAME_SIGNAL_S = 0.3
"""Seconds within which a second signal counts as the first: it is sent to a group of processes and forwarded by
one of them."""


def run(job: ServeJob) -> int:
    """Serve until stopped. Returns the exit code.

    Raises:
        ConfigError: another process has the folder of --prefix-cache-dir.
    """
    folder = job.config.prefix_cache_dir
    if folder:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with one_writer(folder) if folder else contextlib.nullcontext():
        return _serve(job)


def _serve(job: ServeJob) -> int:
    """Serve until stopped. Returns the exit code."""
    service = Service(job)
    is_server = launched_rank() == job.strategy.mesh.first_rank_of_last_stage
    http = _Http(service, listen(job.config.host, job.config.port)) if is_server else None
    handler = _on_signal(service) if is_server else signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    try:
        if http:
            http.start()
            for model in job.models:  # takes a second each, in which nothing else would run
                vocabulary(model.tokenizer, model.stop_ids)
        service.open()
        for number in (signal.SIGINT, signal.SIGTERM):  # MindSpore has set its own while compiling
            signal.signal(number, handler)
        if http:
            milestone(f"{job.name} is served at {http.address}")
        service.run()
        service.close()
    except BaseException as error:
        service.fail(f"the server failed: {type(error).__name__}")
        raise
    finally:
        if http:
            http.stop()
    if http:
        milestone("stopped")
    return 0


def _on_signal(service: Service) -> Any:
    first: float | None = None

    def stop(number: int, frame: Any) -> None:
        nonlocal first
        now = time.monotonic()
        if first is not None and now - first < SAME_SIGNAL_S:
            return
        first = first or now
        if service.state in ("draining", "failed"):
            raise KeyboardInterrupt  # on the second signal
        if service.state == "loading":
            raise SystemExit(128 + number)
        milestone("stopping: no new requests, open ones may finish; send the signal again to stop at once")
        service.stop(service.job.config.drain_timeout)

    return stop


class _Http:
    """uvicorn in a thread."""

    def __init__(self, service: Service, listening: socket.socket):
        host, port = listening.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        config = uvicorn.Config(
            build_app(service),
            log_level="warning",
            access_log=False,
            http=TimedProtocol,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=64 * 1024,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        self._server = HttpServer(config, listening, MAX_IDLE + service.job.max_texts)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5)
