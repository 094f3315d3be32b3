# SPDX-License-Identifier: Apache-2.0
"""Access of browsers to the server: allowed hosts and origins, and the headers of every answer.

Programs can send any request, and must have a key. A browser sends requests of pages that its user happens to look at:
`Host` says which name led it here (DNS rebinding: another's name with this address), `Origin` whose page asks.
"""

from __future__ import annotations

import base64
import hashlib
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sporeloom.serve.fields import RequestError, shown
from sporeloom.serve.hosts import DEFAULT_PORTS, AllowedHosts, AllowedOrigins, HostPort, parse_host, parse_origin
from sporeloom.serve.json_response import JsonResponse

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of answers that do not set others."""


class AccessControl:
    """Middleware: refuses requests by `Host` and `Origin`, answers preflights, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, origins: AllowedOrigins):
        self.app, self.hosts, self.origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]  # the server has no others
        headers, cross_origin = Headers(scope=scope), None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(MutableHeaders(scope=message), cross_origin)
            await send(message)

        answer: ASGIApp = self.app
        try:
            _check_framing(headers)
            cross_origin = self._cross_origin(headers, self._host(headers))
            if cross_origin and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                answer = _preflight(headers)
        except RequestError as error:
            answer = JsonResponse(error.body, error.status, error.headers)
        await answer(scope, receive, send_with_headers)

    def _host(self, headers: Headers) -> HostPort:
        """Raises:
        RequestError: not one that is answered for.
        """
        given = headers.getlist("host")
        host = parse_host(given[0]) if len(given) == 1 else None
        if not host:
            raise RequestError(400, "send one Host header, with a host name or address and a port")
        if not self.hosts.allows(host):
            raise RequestError(
                403, f"this server does not answer for host {shown(host.name)}; --allowed-hosts names further ones"
            )
        return host

    def _cross_origin(self, headers: Headers, host: HostPort) -> str | None:
        """The origin of a page of another server that may ask; None: no page of another one asks.

        Raises:
            RequestError: it may not.
        """
        given = headers.getlist("origin")
        if not given:
            return None
        origin = parse_origin(given[0]) if len(given) == 1 else None
        if origin:
            scheme, page = origin  # a proxy with TLS may stand between: the scheme is its own
            if page == HostPort(host.name, host.port or DEFAULT_PORTS[scheme]):
                return None
        if len(given) == 1 and self.origins.allows(given[0]):
            return given[0]
        raise RequestError(
            403, f"pages of {shown(given[0])} may not use this server; --allowed-origins names those that may"
        )


def _check_framing(headers: Headers) -> None:
    """Raises:
    RequestError: its end is said in two ways, so a proxy may see another request behind it than we do (smuggling)."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise RequestError(400, "send Content-Length or Transfer-Encoding, not both", headers={"Connection": "close"})


def _add_headers(headers: MutableHeaders, cross_origin: str | None) -> None:
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)
    if cross_origin:
        headers["Access-Control-Allow-Origin"] = cross_origin
        headers["Cross-Origin-Resource-Policy"] = "cross-origin"
    headers.add_vary_header("Origin")


def _preflight(headers: Headers) -> Response:
    """The request that a browser sends before one with JSON or a key."""
    given = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", ""),
        "Access-Control-Max-Age": "600",
    }
    return Response(status_code=204, headers=given)


def is_json_type(headers: Headers) -> bool:
    """Whether a body is declared as JSON, which no page of another origin can send without a preflight."""
    given = headers.getlist("content-type")
    kind = given[0].partition(";")[0].strip().lower() if len(given) == 1 else ""
    return re.fullmatch(r"application/(?:[a-z0-9!#$&^_.+-]+\+)?json", kind) is not None


def page_policy(page: str) -> str:
    """The Content-Security-Policy of a page with a script and a style of its own: nothing else runs, and nothing comes from
    elsewhere."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
