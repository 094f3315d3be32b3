# SPDX-License-Identifier: Apache-2.0
"""Tools of a file and the isolated `python`: outputs, failures as texts, and what is refused."""

import contextlib
import json
import sys
import threading
import time
import tracemalloc
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sporeloom.align.tools import MAX_BYTES, ToolCall, ToolOutput, Toolset, read_tools
from sporeloom.core.errors import ConfigError
from sporeloom.evaluation.python_tool import python_tool
from sporeloom.train.policy import GRPOConfig


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if raw := given.get("raw"):
            with contextlib.suppress(OSError):  # the other end is closed
                for piece in raw:
                    self.wfile.write(piece.encode())
                    time.sleep(given.get("pause", 0.0))
            return
        if given.get("wait"):
            time.sleep(1.5)
        self.send_response(503 if given.get("busy") else 200)
        self.end_headers()
        self.wfile.write(f"{given['query']} is by the river".encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/search"
    server.shutdown()


def toolset(tmp_path, entries, **limits):
    path = tmp_path / "tools.yaml"
    path.write_text(json.dumps({"tools": [{"name": "f", "description": "", **entry} for entry in entries]}))
    return Toolset(read_tools(path).tools, **{"timeout_s": 10.0, "max_characters": 2000, **limits})


def said(tools, **arguments):
    (found,) = tools.run([ToolCall("f", json.dumps(arguments))])
    return found


def test_an_endpoint_gets_the_arguments_and_its_answer_is_the_output(tmp_path, url):
    tools = toolset(tmp_path, [{"url": url}])
    assert said(tools, query="the mill") == ToolOutput("the mill is by the river", False)
    assert said(tools, query="x", busy=True) == ToolOutput("Error: the tool answered 503 Service Unavailable", True)
    assert said(toolset(tmp_path, [{"url": url}], timeout_s=0.3), query="x", wait=True) == ToolOutput(
        "Error: no answer within 0.3 s", True
    )
    assert said(toolset(tmp_path, [{"url": "http://127.0.0.1:9/x"}])).text == "Error: the tool cannot be reached"


def test_an_endpoint_is_asked_at_its_own_address_and_for_a_complete_answer(tmp_path, url):
    tools = toolset(tmp_path, [{"url": url}])
    moved = [f"HTTP/1.0 302 Found\r\nLocation: {url}/elsewhere\r\n\r\n"]
    assert said(tools, raw=moved) == ToolOutput("Error: the tool answered 302 Found", True)
    head = "HTTP/1.0 200 OK\r\n"
    assert said(tools, raw=[head, "Content-Length: 9\r\n\r\n", "half"]).has_failed
    assert said(tools, raw=[head, "\r\n", "a" * MAX_BYTES]).text.endswith("a" * 99)
    assert said(tools, raw=[head, "\r\n", "a" * (MAX_BYTES + 1)]) == ToolOutput(
        "Error: the tool answered with more than 1,048,576 bytes", True
    )


@pytest.mark.parametrize("fast", ["", "HTTP/1.0 200 OK\r\n\r\n"])
def test_an_endpoint_that_answers_byte_by_byte_has_no_more_time_than_others(tmp_path, url, fast):
    tools, start = toolset(tmp_path, [{"url": url}], timeout_s=0.3), time.monotonic()
    slow = ["HTTP/1.0 200 OK\r\nX: ", *["a"] * 40]
    assert said(tools, raw=[fast, *slow], pause=0.2) == ToolOutput("Error: no answer within 0.3 s", True)
    assert time.monotonic() - start < 6


def test_a_command_has_no_more_time_where_its_children_keep_the_output_open(tmp_path):
    for script in ("setsid sleep 8 & sleep 60", "setsid sleep 8 & exit 0"):
        tools, start = toolset(tmp_path, [{"command": ["sh", "-c", script]}], timeout_s=0.2), time.monotonic()
        assert said(tools) == ToolOutput("Error: no answer within 0.2 s", True)
        assert time.monotonic() - start < 6


def test_no_more_of_an_output_than_the_limit_is_read(tmp_path):
    for redirection in ("", " 1>&2"):
        tools = toolset(tmp_path, [{"command": ["sh", "-c", f"exec yes{redirection}"]}])
        tracemalloc.start()
        assert said(tools) == ToolOutput("Error: the tool wrote more than 1,048,576 bytes", True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * MAX_BYTES


def test_a_command_gets_the_arguments_as_its_input(tmp_path):
    def of(code, **limits):
        return toolset(tmp_path, [{"command": [sys.executable, "-c", code]}], **limits)

    assert said(of("import json, sys; print(sum(json.load(sys.stdin)['of']))"), of=[2, 3]) == ToolOutput("5\n", False)
    assert said(of("import sys; sys.exit('no mill')")).text == "Error: the tool ended with exit code 1: no mill"
    start = time.monotonic()
    assert said(of("import time; time.sleep(60)", timeout_s=0.5)).text == "Error: no answer within 0.5 s"
    assert time.monotonic() - start < 20
    assert said(of("print('a' * 30 + 'b' * 30)", max_characters=20)).text == (
        f"{'a' * 10}\n[... 41 characters left out ...]\n{'b' * 9}\n"
    )
    assert said(toolset(tmp_path, [{"command": ["/no/such"]}])).text.startswith("Error: the tool cannot be started")


def test_programs_run_isolated_and_their_failures_are_texts():
    tools = Toolset([python_tool()], 2.0, 2000)
    codes = ["print(6 * 7)", "1 / 0", "while True: pass", "open('/etc/hostname')"]
    found = tools.run([*(ToolCall("python", json.dumps({"code": code})) for code in codes), ToolCall("python", "{}")])
    assert [output.has_failed for output in found] == [False, True, True, True, True]
    assert found[0].text == "42\n" and found[1].text.endswith("ZeroDivisionError: division by zero")
    assert found[2].text == "Error: no end within 2 s"
    assert "No such file" in found[3].text and 'needs the argument "code"' in found[4].text


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({}, "f: give a url or a command, one of them"),
        ({"url": "http://x/y", "command": ["z"]}, "f: give a url or a command, one of them"),
        ({"url": "ftp://x"}, "url ftp://x: give http://HOST:PORT/PATH"),
        ({"url": "http:///x"}, "url http:///x: an address without a host"),
        ({"command": []}, "f: command is empty"),
        ({"name": "a b", "command": ["x"]}, "name must be up to 128 letters"),
        ({"command": ["x"], "uri": 1}, "uri is unknown; did you mean"),
    ],
)
def test_wrong_files_are_refused(tmp_path, entry, problem):
    with pytest.raises(ConfigError, match=problem):
        toolset(tmp_path, [entry])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"tools": ("python",)}, "--tools python runs programs that a model wrote: give --allow-execution, too"),
        ({"tools": ("pyton",)}, "--tools pyton: give python, or a YAML file of tools"),
        ({"tools": ("no.yaml",)}, "no.yaml: cannot be read"),
        ({"max_turns": 2}, "--max-turns is for tools: give --tools, too"),
        ({"tools": ("python", "python"), "allow_execution": True}, "two tools are named python; rename one"),
    ],
)
def test_wrong_flags_are_refused(flags, problem):
    config = GRPOConfig(data="x", from_checkpoint="y", **flags)
    assert any(problem in each for each in config.tool_problems(config.allow_execution))
