# SPDX-License-Identifier: Apache-2.0
"""Clients that say nothing, say it slowly, do not read, or are too many: a server lets them go, and serves the others."""

import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest
import uvicorn
from serving_at_once import BODY, JSON, Service

from sporeloom.core.log import LogBudget
from sporeloom.serve import connections
from sporeloom.serve.app import build_app
from sporeloom.serve.connections import HttpServer, TimedProtocol
from sporeloom.serve.listening import listen


class Running:
    """An HTTP server in a thread."""

    def __init__(self, max_connections=50, **flags):
        service = Service(**flags)
        listening = listen(service.job.config.host, service.job.config.port)
        self.address = listening.getsockname()
        config = uvicorn.Config(
            build_app(service),
            **{"http": TimedProtocol, "timeout_keep_alive": 1, "lifespan": "off", "ws": "none"},
            **{"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 1},
        )
        self.server = HttpServer(config, listening, max_connections)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def connect(self):
        return socket.create_connection(self.address, timeout=10)

    def get(self, path="/health"):
        client = http.client.HTTPConnection(*self.address, timeout=10)
        try:
            client.request("GET", path)
            answer = client.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            client.close()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def start(monkeypatch):
    for name in ("HEAD_TIMEOUT_S", "REFUSED_TIMEOUT_S", "UNREAD_TIMEOUT_S", "CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(connections, name, 0.5)
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.5)
    monkeypatch.setattr("sporeloom.serve.bodies.BODY_TIMEOUT_S", 0.5)
    running = []

    def begin(**more):
        running.append(Running(**more))
        return running[-1]

    yield begin
    for each in running:
        each.stop()


def read_all(client):
    """What a server says until it ends the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"", b""),
        (b"G", b"HTTP/1.1 408 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"HTTP/1.1 408 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200 "),  # and then nothing
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nG", b"HTTP/1.1 200 "),  # and a request that stops
        (POST, b"HTTP/1.1 408 "),
        (POST + b'{"prompt"', b"HTTP/1.1 408 "),
        (POST.replace(b"/v1/completions", b"/none"), b"HTTP/1.1 404 "),
        (POST.replace(b"Content-Length: 99", b"Transfer-Encoding: chunked") + b"3\r\nabc\r\n", b"HTTP/1.1 408 "),
        (b"\x16\x03\x01\x02\x00\x01\x00", b"HTTP/1.1 400 "),  # TLS
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000, b"HTTP/1.1 400 "),
        (b"GET /health HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /health HTTP/1.0\r\n\r\n", b"HTTP/1.1 400 "),
    ],
)
def test_a_client_that_goes_silent_is_let_go(start, said, answer):
    begin = time.monotonic()
    with start().connect() as client:
        client.sendall(said)
        assert read_all(client).startswith(answer)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\n", POST], ids=["headers", "body"])
def test_a_client_that_speaks_slowly_is_let_go(start, head):
    begin = time.monotonic()
    with start().connect() as client:
        client.sendall(head)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                client.sendall(b"X: y\r\n" if b"POST" not in head else b" ")
                time.sleep(0.1)
    assert time.monotonic() - begin < 5


def test_a_client_that_does_not_read_is_let_go(start):
    running = start()
    with running.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(1)
        with contextlib.suppress(OSError):  # it stops reading requests, too
            for _ in range(2000):
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        deadline = time.monotonic() + 8
        while running.server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running.server.server_state.connections


def test_a_client_that_asks_in_time_keeps_its_connection(start):
    client = http.client.HTTPConnection(*start().address, timeout=10)
    for _ in range(5):
        client.request("POST", "/v1/completions", json.dumps(BODY), JSON)
        assert client.getresponse().read()
        sock = client.sock
        time.sleep(0.3)  # together longer than any time-out but the one between two requests
    assert client.sock is sock
    client.close()


def test_a_host_header_opens_nothing_that_needs_a_key(start):
    running = start(api_key="secret")
    for host in (b"localhost/health?", b"localhost/?", b"localhost/health#", b"x/health?"):
        with running.connect() as client:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
            assert read_all(client).startswith(b"HTTP/1.1 400 ")
    assert running.get("/v1/models")[0] == 401


@pytest.mark.parametrize("order", [1, -1])
def test_no_request_hides_in_another_one(start, order):
    """Its end is said in two ways: who reads the other one, as a proxy may, sees no second request."""
    ends = ["Content-Length: 5", "Transfer-Encoding: chunked"][::order]
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *ends,
        "",
        "0",
        "",
        "",
    ]
    with start().connect() as client:
        client.sendall("\r\n".join([*head, "GET /hidden HTTP/1.1", "Host: localhost", "", ""]).encode())
        told = read_all(client)
    assert told.startswith(b"HTTP/1.1 400 ") and b"not both" in told
    assert told.count(b"HTTP/1.1 ") == 1 and b"hidden" not in told


def test_long_bodies_that_stop_before_their_end_do_not_fill_the_memory(start):
    running = start(max_connections=200, max_body_kb=1)
    crowd = [running.connect() for _ in range(80)]
    for client in crowd:
        client.sendall(POST.replace(b"99", b"1024") + b"{" * 1000)
    said = [read_all(client)[:13] for client in crowd]
    for client in crowd:
        client.close()
    assert said.count(b"HTTP/1.1 408 ") == 64 * 1024 // 1000 and said.count(b"HTTP/1.1 503 ") == 80 - 64 * 1024 // 1000
    # What they held is free again.
    body = json.dumps({**BODY, "user": "x" * 900}).encode()
    with running.connect() as client:
        client.sendall(POST.replace(b"99", str(len(body)).encode()) + body)
        assert client.recv(13) == b"HTTP/1.1 200 "


def test_a_connection_too_many_is_told_to_come_again_and_little_is_logged(start, capfd):
    running = start(max_connections=20)
    idle = [running.connect() for _ in range(20)]
    time.sleep(0.2)
    answers = [running.get() for _ in range(30)]
    assert {status for status, _ in answers} == {503}
    assert answers[0][1]["error"]["message"] == "too many connections; try again later"
    deadline = time.monotonic() + 10
    while running.get()[0] != 200 and time.monotonic() < deadline:  # the idle ones are let go
        time.sleep(0.1)
    assert running.get()[0] == 200
    for client in idle:
        client.close()
    assert 0 < len(capfd.readouterr().err) < 2000


CROWD = """
import socket, sys, time
sys.stdin.readline()  # until the server has few files left: this process has a limit of its own
crowd = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) for _ in range(200)]
time.sleep(0.3)
for client in crowd:
    try:
        client.settimeout(5)
        print(client.recv(100))
    except OSError as error:
        print(error)
"""


@pytest.fixture
def files():
    """Sets how many files this process may open besides those that it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []

    def leave(count):
        top = max(map(int, os.listdir("/proc/self/fd"))) + 1
        while not taken or taken[-1] < top:  # numbers that are free below
            taken.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + count, hard))
        return taken[-1] + count

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for number in taken:
        os.close(number)


@pytest.mark.parametrize("is_known", [True, False], ids=["some are left", "none is left"])
def test_without_file_descriptors_it_says_so_and_goes_on(start, files, monkeypatch, capfd, is_known):
    running = start(max_connections=10**4)
    command = [sys.executable, "-c", CROWD, str(running.address[1])]
    crowd = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    limit = files(60)
    monkeypatch.setattr(running.server, "_max_files", limit if is_known else 10**6)  # others open files, too
    said, _ = crowd.communicate("\n", timeout=60)
    assert crowd.returncode == 0 and "HTTP/1.1 503 Service Unavailable" in said, said
    status, deadline = 0, time.monotonic() + 20
    while status != 200 and time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            status = running.get()[0]
        time.sleep(0.1)
    assert status == 200
    assert len(capfd.readouterr().err) < 3000


def test_what_clients_cause_to_be_logged_is_bounded(start, capfd):
    running = start()
    for _ in range(60):
        with running.connect() as client:
            client.sendall(b"nonsense\r\n\r\n")
            assert read_all(client).startswith(b"HTTP/1.1 400 ")
    assert capfd.readouterr().err.count("Invalid HTTP request") <= 5


def test_a_log_says_how_much_it_left_out():
    now = [0.0]
    budget = LogBudget(2, lambda: now[0])
    assert [budget.take("a") for _ in range(5)] == ["", "", None, None, None]
    assert budget.take("b") == ""  # of its own
    now[0] = 59.0
    assert budget.take("a") is None
    now[0] = 61.0
    assert [budget.take("a") for _ in range(3)] == [" (4 more like this since the last one)", "", None]
    now[0] = 1000.0
    assert budget.take("b") == ""
