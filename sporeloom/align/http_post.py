# SPDX-License-Identifier: Apache-2.0
"""POST requests to tools and reward servers: answered within a time and a size, by the very address."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.request
from typing import Any


class TooLongAnswerError(Exception):
    """The answer exceeds the maximum size."""


def post(url: str, content: bytes, seconds: float, max_bytes: int) -> bytes:
    """Send JSON text. Returns the body of the answer. Redirections are not followed: they would lose the body.

    Raises:
        TimeoutError: the answer was not complete in time.
        TooLongAnswerError: it has more than `max_bytes`.
        urllib.error.HTTPError: it is not a success.
        OSError, http.client.HTTPException: there is none.
    """
    sockets = _Sockets()
    opener = urllib.request.build_opener(_NoRedirects, _Handler(sockets), _SecureHandler(sockets))
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method="POST")
    timer = threading.Timer(seconds, sockets.shut_down)
    timer.daemon = True
    timer.start()
    try:
        with opener.open(request, timeout=seconds) as answer:
            found: bytes = answer.read(max_bytes + 1)
            missing = answer.length or 0
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None)
        if sockets.are_shut_down or isinstance(reason, TimeoutError):
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
    if sockets.are_shut_down:  # what came so far may be a part
        raise TimeoutError
    if len(found) > max_bytes:
        raise TooLongAnswerError(f"answered with more than {max_bytes:,} bytes")
    if missing:
        raise http.client.IncompleteRead(found, missing)
    return found


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Leave the answer as it is: an error."""


class _Sockets:
    """Sockets of a request, whose own time-outs are of each read alone."""

    def __init__(self) -> None:
        self.are_shut_down = False
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()

    def add(self, opened: socket.socket) -> None:
        with self._lock:
            if self.are_shut_down:
                raise TimeoutError
            self._open.append(opened)

    def shut_down(self) -> None:
        """End whatever is read from them."""
        with self._lock:
            self.are_shut_down = True
            for each in self._open:
                with contextlib.suppress(OSError):  # closed by now
                    socket.socket.shutdown(each, socket.SHUT_RDWR)  # also below TLS


class _Recording:
    """Handler that notes the sockets it opens."""

    def __init__(self, sockets: _Sockets):
        super().__init__()
        self.sockets = sockets

    def do_open(self, http_class: Any, *given: Any, **named: Any) -> Any:
        sockets = self.sockets

        class Connection(http_class):
            def connect(self) -> None:
                super().connect()
                sockets.add(self.sock)

        opening: Any = super()
        return opening.do_open(Connection, *given, **named)


class _Handler(_Recording, urllib.request.HTTPHandler):
    pass


class _SecureHandler(_Recording, urllib.request.HTTPSHandler):
    pass
