# SPDX-License-Identifier: Apache-2.0
"""What clients and web pages can ask of a server, and what they cannot. The model behind it is none."""

import asyncio
import base64
import hashlib
import json
import re
import socket
import time

import httpx
import pytest
from serving_at_once import BODY, JSON, Service

from sporeloom.core.errors import ConfigError
from sporeloom.serve.app import PAGE, build_app
from sporeloom.serve.hosts import AllowedHosts, AllowedOrigins


def ask(method, path, headers=(), body=None, **flags):
    """A request to an application, with these headers and no others but `Host`."""

    async def work():
        transport = httpx.ASGITransport(app=build_app(Service(**flags)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            request = client.build_request(method, path, content=None if body is None else json.dumps(body).encode())
            for name, value in dict(headers).items():
                request.headers[name] = value
            return await client.send(request)

    return asyncio.run(work())


# Whose pages may ask


@pytest.mark.parametrize(
    ("host", "bound", "names", "status"),
    [
        ("127.0.0.1:8000", "127.0.0.1", (), 200),
        ("localhost:8000", "127.0.0.1", (), 200),
        ("LOCALHOST", "127.0.0.1", (), 200),
        ("localhost.", "127.0.0.1", (), 200),
        ("[::1]:8000", "127.0.0.1", (), 200),
        ("[0:0:0:0:0:0:0:1]", "::1", (), 200),
        ("127.8.8.8", "127.0.0.1", (), 200),
        ("localhost:9", "127.0.0.1", (), 200),  # forwarded from another port
        ("evil.example", "127.0.0.1", (), 403),
        ("evil.example:8000", "127.0.0.1", (), 403),
        ("localhost.evil.example", "127.0.0.1", (), 403),
        ("evillocalhost", "127.0.0.1", (), 403),
        ("127.0.0.1.evil.example", "127.0.0.1", (), 403),
        ("127.0.0.1.nip.io", "0.0.0.0", (), 403),
        ("10.0.0.1", "127.0.0.1", (), 403),
        ("evil.example", "0.0.0.0", (), 403),
        ("evil.example", "::", (), 403),
        ("10.0.0.1:8000", "0.0.0.0", (), 200),
        ("[fe80::1]", "::", (), 200),
        (socket.gethostname(), "0.0.0.0", (), 200),
        ("10.0.0.5", "10.0.0.5", (), 200),
        ("10.0.0.6", "10.0.0.5", (), 403),
        ("gpu.example.com", "gpu.example.com", (), 200),
        ("llm.example.com", "127.0.0.1", ("llm.example.com",), 200),
        ("LLM.Example.com.:443", "127.0.0.1", ("llm.example.com",), 200),
        ("a.llm.example.com", "127.0.0.1", ("llm.example.com",), 403),
        ("a.example.com", "127.0.0.1", ("*.example.com",), 200),
        ("example.com", "127.0.0.1", ("*.example.com",), 403),
        ("evilexample.com", "127.0.0.1", ("*.example.com",), 403),
        ("localhost", "127.0.0.1", ("llm.example.com",), 200),
        ("any.thing", "127.0.0.1", ("*",), 200),
        ("", "127.0.0.1", (), 400),
        ("a b", "127.0.0.1", ("*",), 400),
        ("user@localhost", "127.0.0.1", (), 400),
        ("localhost/health?", "127.0.0.1", (), 400),
        ("localhost#", "127.0.0.1", (), 400),
        ("localhost:8000:1", "127.0.0.1", (), 400),
        ("[zz]", "127.0.0.1", (), 400),
        ("http://localhost", "127.0.0.1", (), 400),
    ],
)
def test_a_server_answers_for_hosts_that_are_its_own_alone(host, bound, names, status):
    found = ask("GET", "/health", {"Host": host}, host=bound, allowed_hosts=names)
    assert found.status_code == status, found.text


@pytest.mark.parametrize(
    ("origin", "host", "origins", "status"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", (), 200),
        ("http://localhost:8000", "localhost:8000", (), 200),
        ("http://localhost", "localhost", (), 200),
        ("http://localhost:80", "localhost", (), 200),
        ("https://localhost", "localhost", (), 200),  # behind a proxy with TLS
        ("https://localhost", "localhost:443", (), 200),
        ("http://[::1]:8000", "[::1]:8000", (), 200),
        ("http://evil.example", "127.0.0.1:8000", (), 403),
        ("http://localhost:3000", "localhost:8000", (), 403),  # another server of this machine
        ("http://localhost:8000", "127.0.0.1:8000", (), 403),
        ("http://localhost", "localhost:8000", (), 403),
        ("null", "127.0.0.1:8000", (), 403),
        ("", "127.0.0.1:8000", (), 403),
        ("file://", "127.0.0.1:8000", (), 403),
        ("chrome-extension://abc", "127.0.0.1:8000", (), 403),
        ("http://127.0.0.1:8000@evil.example", "127.0.0.1:8000", (), 403),
        ("http://127.0.0.1:8000.evil.example", "127.0.0.1:8000", (), 403),
        ("https://chat.example.com", "127.0.0.1:8000", ("https://chat.example.com",), 200),
        ("https://chat.example.com:443", "127.0.0.1:8000", ("https://chat.example.com",), 200),
        ("http://chat.example.com", "127.0.0.1:8000", ("https://chat.example.com",), 403),
        ("https://chat.example.com:8443", "127.0.0.1:8000", ("https://chat.example.com",), 403),
        ("https://evil.example", "127.0.0.1:8000", ("https://chat.example.com",), 403),
        ("null", "127.0.0.1:8000", ("https://chat.example.com",), 403),
        ("https://any.thing", "127.0.0.1:8000", ("*",), 200),
    ],
)
def test_pages_of_others_may_not_ask(origin, host, origins, status):
    headers = {"Host": host, "Origin": origin, **JSON}
    found = ask("POST", "/v1/completions", headers, BODY, allowed_origins=origins)
    assert found.status_code == status, found.text
    given = found.headers.get("access-control-allow-origin")
    assert given == (origin if status == 200 and origins else None)
    # A form of that page needs no preflight, and reads nothing; the request must not be done all the same.
    preflight = ask(
        "OPTIONS", "/v1/completions", {**headers, "Access-Control-Request-Method": "POST"}, allowed_origins=origins
    )
    assert (preflight.status_code == 204) == bool(status == 200 and origins)


def test_an_origin_that_is_allowed_may_send_json_and_a_key():
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    found = ask("OPTIONS", "/v1/completions", {"Origin": "https://a.b", **wanted}, allowed_origins=("https://a.b",))
    assert found.headers["access-control-allow-origin"] == "https://a.b"
    assert found.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in found.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in found.headers


@pytest.mark.parametrize("flag", ["hosts", "origins"])
@pytest.mark.parametrize("word", ["", "a b", "http://", "a/b", "user@a.b", "*.", "ftp://a.b", "a.b:x"])
def test_names_that_are_none_are_refused(flag, word):
    with pytest.raises(ConfigError, match=f"--allowed-{flag} "):
        AllowedHosts("127.0.0.1", (word,)) if flag == "hosts" else AllowedOrigins((word,))


@pytest.mark.parametrize("word", ["https://a.b", "a.b:80", "a.b/"])
def test_a_host_is_named_without_scheme_and_port(word):
    with pytest.raises(ConfigError, match="without scheme, port or path"):
        AllowedHosts("127.0.0.1", (word,))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("kind", "is_json"),
    [
        ("application/json", True),
        ("Application/JSON", True),
        ("application/json; charset=utf-8", True),
        ("application/json;charset=utf-8", True),
        ("application/vnd.api+json", True),
        (None, False),
        ("", False),
        ("text/plain", False),
        ("text/plain; application/json", False),
        ("text/plain, application/json", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=application/json", False),
        ("application/jsonx", False),
        ("text/json", False),
    ],
)
def test_only_json_is_read(path, kind, is_json):
    found = ask("POST", path, {} if kind is None else {"Content-Type": kind}, {**BODY, "tokens": [97]})
    if is_json:
        assert found.status_code == (400 if "chat" in path else 200)
    else:
        assert (found.status_code, found.json()["error"]["code"]) == (415, 415)
        assert "Content-Type: application/json" in found.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/metrics/", "/v1//models", "/v1/completions/"])
def test_nothing_is_redirected_to_where_the_host_header_says(path):
    found = ask("GET", path, {"Host": "evil.example"}, allowed_hosts=("*",))
    assert found.status_code == 404 and "location" not in found.headers


def test_the_page_runs_its_own_script_and_nothing_else():
    found = ask("GET", "/")
    policy = dict(part.strip().split(" ", 1) for part in found.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and "unsafe" not in str(policy)
    for kind in ("script", "style"):
        (text,) = re.findall(f"<{kind}>(.*?)</{kind}>", found.text, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert found.text == PAGE and not re.search(r"\son\w+=|\sstyle=|<script [^>]*src", PAGE)  # which the policy forbids


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/none"), ("POST", "/"), ("GET", "/metrics")])
def test_every_answer_has_the_headers_that_keep_pages_out(method, path):
    headers = ask(method, path).headers
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


# What is asked for


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *(("town", "town"), ("org/helper", "org/helper"), ("org%2Fhelper", "org/helper")),
        *(("none", None), ("", None), ("town/", None), ("../town", None), ("Town", None), ("x" * 3000, None)),
    ],
)
def test_a_model_is_described_by_its_name(name, found):
    answer = ask("GET", f"/v1/models/{name}")
    if found:
        listed = {each["id"]: each for each in ask("GET", "/v1/models").json()["data"]}
        assert {**answer.json(), "created": 0} == {**listed[found], "created": 0}
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, 404) and set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({**BODY, "n": 13}, 200, None),
        ({**BODY, "n": 14}, 400, "n"),
        ({**BODY, "prompt": ["a"] * 13}, 200, None),
        ({**BODY, "prompt": ["a"] * 14}, 400, "n"),
        ({**BODY, "prompt": ["a"] * 2, "n": 7}, 400, "n"),
        ({**BODY, "prompt": ["a"] * 100, "n": 128, "stream": True}, 400, "n"),
    ],
)
def test_more_than_the_queue_ever_holds_is_a_mistake(body, status, param):
    found = ask("POST", "/v1/completions", JSON, body, max_queue=5, max_num_seqs=8)
    assert found.status_code == status, found.text
    if status == 400:
        assert found.json()["error"]["param"] == param and "at most 13" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": [97] * 200_000, "echo": True, "n": 128, "max_tokens": 0}, 400),
        ("/v1/completions", {"prompt": "a", "stop": "x" * 200_000}, 400),
        ("/v1/completions", {"prompt": "a", "stop": ["x" * 1025]}, 400),
        ("/v1/completions", {"prompt": "a", "stop": "x" * 1024, "max_tokens": 1}, 200),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 200_000, "max_tokens": 1}, 200),  # one token
        ("/v1/completions", {"prompt": "a" * 900_000}, 400),
        ("/tokenize", {"prompt": "a" * 900_000}, 200),
        ("/detokenize", {"tokens": [97] * 200_000}, 200),
    ],
)
def test_long_fields_hold_nobody_up(path, body, status):
    async def work():
        transport = httpx.ASGITransport(app=build_app(Service()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            begin = time.monotonic()
            long = asyncio.ensure_future(client.post(path, json=body))
            longest = 0.0
            while not long.done():
                since = time.monotonic()
                await client.get("/health")
                await asyncio.sleep(0.001)
                longest = max(longest, time.monotonic() - since)
            return (await long).status_code, longest, time.monotonic() - begin

    found, longest, whole = asyncio.run(work())
    assert found == status
    assert longest < 0.5 and whole < 5.0, (longest, whole)
