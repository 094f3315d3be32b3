# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: their size is limited, each and all together, and the time they take to arrive."""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from sporeloom.serve.fields import Fields, RequestError, read_json

MAX_BODIES = 64
"""Number of the longest bodies that may be in memory at once; of shorter ones more."""
BODY_TIMEOUT_S = 30.0
"""Seconds for a body to arrive."""
_LAST = {"Connection": "close"}
"""Close answers that are not read to their end."""


class Bodies:
    """The bodies of all requests that are not answered yet.

    Args:
        max_kb: size of one.
    """

    def __init__(self, max_kb: int):
        self._max_kb, self._bytes = max_kb, 0

    async def read(self, request: Request) -> Fields:
        """Read a body, up to the size limit.

        Raises:
            RequestError: it is too long, too slow, or no JSON object.
        """
        limit = self._max_kb * 1024
        too_long = RequestError(413, f"the request is longer than {self._max_kb} KB", headers=_LAST)
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

    def release(self, request: Request) -> None:
        """Forget a body: its request has been answered."""
        self._bytes -= getattr(request.state, "body_bytes", 0)

    def _hold(self, request: Request, count: int) -> None:
        """Count bytes of a body.

        Raises:
            RequestError: those of all requests are too many.
        """
        if self._bytes + count > MAX_BODIES * self._max_kb * 1024:
            raise RequestError(503, "too many long requests; try again later", headers={"Retry-After": "1", **_LAST})
        self._bytes += count
        request.state.body_bytes = getattr(request.state, "body_bytes", 0) + count
