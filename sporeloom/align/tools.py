# SPDX-License-Identifier: Apache-2.0
"""Tools that a model calls while its texts are sampled: commands and HTTP endpoints that a file names.

tools:
  - name: search
    description: Search the town's records.
    parameters: {type: object, properties: {query: {type: string}}, required: [query]}
    url: http://127.0.0.1:8700/search
  - name: add
    description: Add two numbers.
    command: [python3, tools/add.py]

A call's arguments go to an endpoint as the body of a POST request, to a command as its standard input, both as the JSON text
that the model wrote. The body of the answer, or the standard output, is what the tool says.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from sporeloom.align.http_post import TooLongAnswerError, post
from sporeloom.align.reward_server import SCHEMES, address_problem
from sporeloom.core.document import read_text
from sporeloom.core.errors import ConfigError
from sporeloom.core.json_text import json_text
from sporeloom.core.reader import fields_from
from sporeloom.core.yaml_text import YamlReader

MAX_BYTES = 1 << 20
"""Maximum size of an answer; a longer one is an error."""
CHUNK_BYTES = 1 << 16
"""Maximum number of bytes that are read at once."""
MAX_WORKERS = 16
"""Maximum number of calls at the same time."""
PYTHON = "python"
PYTHON_FUNCTION = {
    "name": PYTHON,
    "description": "Run a Python program, without a network, and return what it prints.",
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The program; print the results."}},
        "required": ["code"],
    },
}
"""The tool that runs programs isolated, as chat templates read it."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_CUT = "\n[... {} characters left out ...]\n"


class ToolError(Exception):
    """A tool has no answer; the message says why, for the model."""


class ToolCall(NamedTuple):
    """A call that a model wrote."""

    name: str
    arguments: str
    """JSON text of an object."""


class ToolOutput(NamedTuple):
    """Text of a tool's turn."""

    text: str
    has_failed: bool


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    function: Mapping[str, Any]
    """Its name, description and parameters, as OpenAI's API has them."""
    call: Callable[[str, float], str] = field(repr=False)
    """Called with the JSON text of the arguments, and the seconds that it may take; raises `ToolError`."""

    @property
    def name(self) -> str:
        name: str = self.function["name"]
        return name

    @property
    def offered(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return offered(self.function)


def offered(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chat templates read it."""
    return {"type": "function", "function": dict(function)}


@dataclass(frozen=True)
class ToolEntry:
    """One entry of the file."""

    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments."""
    url: str | None = None
    """Address of an endpoint."""
    command: list[str] | None = None
    """A program and its arguments."""

    def __post_init__(self) -> None:
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(f"name must be up to 128 letters, digits, _, . or -, got {self.name!r}")
        if (self.url is None) == (self.command is None):
            problems.append(f"{self.name}: give a url or a command, one of them")
        if self.url is not None and (problem := _url_problem(self.url)):
            problems.append(problem)
        if self.command is not None and not self.command:
            problems.append(f"{self.name}: command is empty; give a program and its arguments")
        if problems:
            raise ConfigError(problems)

    def tool(self) -> Tool:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        if self.url is not None:
            url = self.url
            return Tool(function, lambda arguments, seconds: ask_endpoint(url, arguments, seconds))
        command = self.command or []
        return Tool(function, lambda arguments, seconds: run_command(command, arguments, seconds))


def _url_problem(url: str) -> str | None:
    if url.partition("://")[0] not in SCHEMES:
        return f"url {url}: give http://HOST:PORT/PATH"
    problem = address_problem(url)
    return problem and problem.replace("--reward", "url", 1)


@dataclass(frozen=True)
class ToolsFile:
    """Contents of the file."""

    tools: list[ToolEntry]


class ReadTools(NamedTuple):
    """Tools of a file."""

    tools: list[Tool]
    identity: str
    """Hash of the file, which a resumed run has in common."""


def read_tools(path: Path) -> ReadTools:
    """Read the tools that a file names.

    Raises:
        ConfigError: the file is missing or wrong; all problems at once.
    """
    text = read_text(path)
    found = fields_from(ToolsFile, YamlReader(str(path)).read(text)).tools
    if not found:
        raise ConfigError(f"{path}: tools is empty; name at least one")
    return ReadTools([entry.tool() for entry in found], hashlib.sha256(text.encode()).hexdigest()[:16])


def ask_endpoint(url: str, arguments: str, seconds: float) -> str:
    """Send the arguments by POST. Returns the text of the answer.

    Raises:
        ToolError: there is none.
    """
    try:
        return post(url, arguments.encode(), seconds, MAX_BYTES).decode(errors="replace")
    except TooLongAnswerError as error:
        raise ToolError(f"the tool {error}") from None
    except urllib.error.HTTPError as error:
        raise ToolError(f"the tool answered {error.code} {error.reason}") from None
    except TimeoutError:
        raise ToolError(f"no answer within {seconds:g} s") from None
    except (OSError, http.client.HTTPException):
        raise ToolError("the tool cannot be reached") from None


def run_command(command: Sequence[str], arguments: str, seconds: float) -> str:
    """Run a program with the arguments as its standard input. Returns its standard output.

    Raises:
        ToolError: it fails, takes too long or writes too much; all processes of its group are killed in any case.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryFile() as given:
        given.write(arguments.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise ToolError(f"the tool cannot be started: {error.strerror}") from None
    assert process.stdout and process.stderr
    try:
        with process.stdout as output, process.stderr as errors:
            texts = _read_to_end([output, errors], deadline)
        process.wait(max(deadline - time.monotonic(), 0.0))
    except (subprocess.TimeoutExpired, TimeoutError):
        raise ToolError(f"no answer within {seconds:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        detail = texts[1].decode(errors="replace").strip()
        raise ToolError(f"the tool ended with exit code {process.returncode}" + (f": {detail}" if detail else ""))
    return texts[0].decode(errors="replace")


def _read_to_end(pipes: Sequence[IO[bytes]], deadline: float) -> list[bytes]:
    """Read pipes to their ends.

    Raises:
        TimeoutError: another process keeps one open.
        ToolError: more than `MAX_BYTES` came from one.
    """
    found = [bytearray() for _ in pipes]
    with selectors.DefaultSelector() as selector:
        for pipe, content in zip(pipes, found, strict=True):
            selector.register(pipe, selectors.EVENT_READ, content)
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                piece = os.read(key.fd, CHUNK_BYTES)
                if not piece:
                    selector.unregister(key.fileobj)
                key.data.extend(piece)
                if len(key.data) > MAX_BYTES:
                    raise ToolError(f"the tool wrote more than {MAX_BYTES:,} bytes")
    return [bytes(content) for content in found]


@dataclass(frozen=True)
class Toolset:
    """The tools of a run, and their limits."""

    tools: Sequence[Tool]
    timeout_s: float
    """Seconds that a call may take."""
    max_characters: int
    """Maximum number of characters of an output; the middle of longer ones is left out."""

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them."""
        return [tool.offered for tool in self.tools]

    def run(self, calls: Sequence[ToolCall]) -> list[ToolOutput]:
        """Run calls, several at once. Returns their outputs in the order of the calls; failures are texts, too."""
        if not calls:
            return []
        with ThreadPoolExecutor(min(MAX_WORKERS, len(calls), 2 * (os.cpu_count() or 1))) as pool:
            return list(pool.map(self._output, calls))

    def _output(self, call: ToolCall) -> ToolOutput:
        known = {tool.name: tool for tool in self.tools}
        try:
            if call.name not in known:
                raise ToolError(f"there is no tool {json_text(call.name)}; tools: {', '.join(known)}")
            text, has_failed = known[call.name].call(call.arguments, self.timeout_s), False
        except ToolError as error:
            text, has_failed = f"Error: {error}", True
        except Exception as error:  # whatever a tool does, the other conversations continue
            text, has_failed = f"Error: {type(error).__name__}: {error}", True
        return ToolOutput(self._shortened(text.encode(errors="replace").decode()), has_failed)

    def _shortened(self, text: str) -> str:
        if len(text) <= self.max_characters:
            return text
        start = self.max_characters // 2
        end = self.max_characters - start
        return text[:start] + _CUT.format(len(text) - self.max_characters) + text[len(text) - end :]


def text_argument(arguments: str, name: str) -> str:
    """The argument `name` of a call, which is a text.

    Raises:
        ToolError: it is missing or something else.
    """
    values = json.loads(arguments)
    if not isinstance(values.get(name), str):
        given = f"; given: {', '.join(map(str, values))}" if values else ""
        raise ToolError(f'the call needs the argument "{name}", a text{given}')
    text: str = values[name]
    return text
