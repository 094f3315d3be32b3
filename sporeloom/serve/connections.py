# SPDX-License-Identifier: Apache-2.0
"""Connections to the server: their maximum number, and time limits for each.

A client that says nothing, says it too slowly, or does not read its answer, is disconnected; one that comes when there
are too many gets status 503. What clients can cause to be logged is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from typing import Any

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sporeloom.core.json_text import json_text
from sporeloom.core.log import LogBudget
from sporeloom.serve.bodies import BODY_TIMEOUT_S
from sporeloom.serve.fields import RequestError
from sporeloom.serve.json_response import JsonResponse

HEAD_TIMEOUT_S = 10.0
"""Seconds from the first byte of a request, or from the connection, to the end of its headers."""
REFUSED_TIMEOUT_S = 2.0
"""The same where there are too many connections."""
KEEP_ALIVE_S = 30
"""Seconds between two requests."""
UNREAD_TIMEOUT_S = 60.0
"""Seconds for a client to take some of the data sent to it."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds for a client to take the rest, once its connection is closed."""
MAX_IDLE = 1024
"""Number of connections besides those whose requests may wait or run."""
SPARE_FILES = 32
"""Number of file descriptors left to the rest of the process, and to refused clients."""
MAX_REFUSED = 16
"""Maximum number of clients that get a full refusal at once; further ones are refused before they have sent
anything."""
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
GONE = (errno.ECONNABORTED, errno.EPROTO)
"""A client disconnected before it was accepted."""
RETRY_S = 0.2
LOGGERS = ("uvicorn.error", "asyncio")
_TOO_MANY = RequestError(503, "too many connections; try again later", headers={"Retry-After": "1"})


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of refused connections."""
    headers = {**_TOO_MANY.headers, "Connection": "close"}
    await JsonResponse(_TOO_MANY.body, _TOO_MANY.status, headers)(scope, receive, send)


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with time limits. uvicorn has only one, between two requests."""

    is_refused = False
    """Refused connection: its request gets a 503, whatever it is."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self._awaited: str | None = None
        self._head_timeout_s = HEAD_TIMEOUT_S
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None

    def refuse(self) -> None:
        self.is_refused, self._head_timeout_s = True, REFUSED_TIMEOUT_S
        self.app = _refuse

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await("head")

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing, self._closing):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """Start or stop the time limit, depending on whether the server waits for data from the client."""
        if self.transport.is_closing():
            self._close()
        elif self.conn.their_state is h11.SEND_BODY:
            self._await("body")
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await("head")
        else:
            self._await(None)

    def _await(self, what: str | None) -> None:
        if what == self._awaited:
            return
        self._awaited = what
        if self._reading:
            self._reading.cancel()
        limit = self._head_timeout_s if what == "head" else BODY_TIMEOUT_S + CLOSE_TIMEOUT_S  # a handler answers sooner
        self._reading = self.loop.call_later(limit, self._too_slow) if what else None

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self._awaited == "head" and self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            error = RequestError(408, f"the headers did not arrive within {self._head_timeout_s:g} s")
            self.transport.write(_answer(error))
        self._close()

    def _close(self) -> None:
        self._await(None)
        self.transport.close()  # what was written still leaves, if somebody takes it
        self._closing = self._closing or self.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self._writing or self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing:
            self._writing.cancel()
            self._writing = None


def _answer(error: RequestError) -> bytes:
    """The bytes of an answer that no request preceded."""
    body = json_text(error.body).encode()
    phrase = {408: "Request Timeout", 503: "Service Unavailable"}[error.status]
    headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", **error.headers}
    lines = [f"HTTP/1.1 {error.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


class HttpServer(uvicorn.Server):
    """uvicorn that accepts connections only while their number is below the maximum.

    Args:
        listening: the socket.
        max_connections: besides those that are refused.
    """

    def __init__(self, config: uvicorn.Config, listening: socket.socket, max_connections: int):
        super().__init__(config)
        self._listening, self._max = listening, max_connections
        self._max_files = _allow_files(max_connections + 2 * SPARE_FILES + 256)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._log = LogBudget()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._listening.setblocking(False)
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self._log.filter)
        self._accepting = asyncio.create_task(self._accept())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._accepting
        self._listening.close()
        self._drop_spare()
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self._log.filter)
        await super().shutdown(sockets=[])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno in OUT_OF_FILES:
                    self._note(os.strerror(error.errno or 0))
                    self._send_away()
                if error.errno not in GONE:
                    await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._take(loop, client)
            except Exception as error:  # of this client alone
                client.close()
                self._log.log("accept", f"a connection failed: {type(error).__name__}: {error}")

    async def _take(self, loop: asyncio.AbstractEventLoop, client: socket.socket) -> None:
        """Create the protocol of a connection; one too many is refused."""
        connections: set[Any] = self.server_state.connections
        # The lowest free number is taken: it says how many are in use, by whatever.
        is_full = len(connections) >= self._max or client.fileno() >= self._max_files - SPARE_FILES
        if is_full:
            num_refused = sum(each.is_refused for each in connections)
            self._note(f"{len(connections) - num_refused} are open")
            if num_refused >= MAX_REFUSED:
                with contextlib.suppress(OSError), client:
                    client.send(_answer(_TOO_MANY))
                return

        def protocol() -> TimedProtocol:
            made = TimedProtocol(self.config, self.server_state, self.lifespan.state, loop)
            if is_full:
                made.refuse()
            return made

        await loop.connect_accepted_socket(protocol, client)

    def _note(self, why: str) -> None:
        self._log.log("full", f"no more connections ({why}): new ones get status 503")

    def _send_away(self) -> None:
        """Refuse one client when no file descriptors are left, with the one that is reserved for that."""
        self._drop_spare()
        with contextlib.suppress(OSError):  # nobody waits any longer, or somebody else took the descriptor
            client, _ = self._listening.accept()
            with client:
                client.setblocking(False)
                client.send(_answer(_TOO_MANY))
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _drop_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def _allow_files(wanted: int) -> int:
    """Raise the limit of open files to this number. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted if soft == resource.RLIM_INFINITY else soft
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return allowed
    return soft
