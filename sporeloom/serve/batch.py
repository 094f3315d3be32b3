# SPDX-License-Identifier: Apache-2.0
"""Batch files in OpenAI's format: a request a line, and in the same order an answer a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from sporeloom.core.command_line import argument, option
from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line
from sporeloom.core.numbers import Count
from sporeloom.data.documents import decode_text
from sporeloom.inference.config import ComputeFlags
from sporeloom.inference.pooling import Pooling
from sporeloom.inference.speculation_config import SpeculationFlags
from sporeloom.serve.config import ServeConfig, ServeJob, check
from sporeloom.serve.fields import shown

TEXT_URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
VECTOR_URLS = ("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank")
URLS = TEXT_URLS + VECTOR_URLS
MAX_SHOWN = 10
"""Number of wrong lines that are reported."""
NO_TIMEOUT_S = 1e8


def _same(name: str) -> Any:
    """The flag of `sporeloom serve` with this name."""
    found = {field.name: field for field in fields(ServeConfig)}[name]
    return option(found.default, found.metadata["help"])


@dataclass(frozen=True, kw_only=True)
class BatchConfig(ComputeFlags, SpeculationFlags):
    """One call of `sporeloom batch`."""

    heading: ClassVar[str] = "batch"
    common: ClassVar[tuple[str, ...]] = ("max_num_seqs", "max_model_len")

    checkpoint: Path = argument("checkpoint folder")
    input: Path = argument("JSON lines with `custom_id`, `method`, `url` and `body`, as for OpenAI's Batch API")
    output: Path = argument("JSON lines to write, in the same order; an existing file is continued")
    served_model_name: str | None = _same("served_model_name")
    max_num_seqs: Count = _same("max_num_seqs")
    max_model_len: Count | None = _same("max_model_len")
    prefill_chunk: Count | None = _same("prefill_chunk")
    tool_call_parser: str = _same("tool_call_parser")
    reasoning_parser: str = _same("reasoning_parser")
    lora_modules: tuple[str, ...] = _same("lora_modules")
    embeddings: Pooling | None = _same("embeddings")

    @property
    def serving(self) -> ServeConfig:
        """Configuration of a server that would answer these requests."""
        known = {field.name for field in fields(ServeConfig)}
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name in known}
        return ServeConfig(
            **given, port=0, max_queue=max(4096, 256 * self.max_num_seqs), request_timeout=NO_TIMEOUT_S,
            response_store_mb=0, max_body_kb=2**20,
        )  # fmt: skip


@dataclass(frozen=True)
class BatchRequest:
    """A line of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchJob:
    """A valid batch."""

    serving: ServeJob
    output: Path
    waiting: list[BatchRequest]
    """Requests without an answer in the output."""
    num_done: int
    """Number of requests before them, which have one."""


def check_batch(config: BatchConfig, num_processes: int | None, rank: int = 0) -> BatchJob:
    """Read everything that the call refers to.

    Raises:
        ConfigError: all problems of the files, or else of the model.
    """
    requests = read_requests(config.input)
    if config.embeddings is None and (url := next((each.url for each in requests if each.url in VECTOR_URLS), None)):
        raise ConfigError(f"{config.input}: has requests for {url}; give --embeddings last, or mean")
    done = finished_ids(config.output)
    for place, (name, request) in enumerate(zip(done, requests, strict=False), 1):
        if name != request.custom_id:
            raise ConfigError(
                f"{config.output}: line {place} answers {shown(name)}, but line {place} of {config.input} is "
                f"{shown(request.custom_id)}: continue with the same requests, or write to another file"
            )
    if len(done) > len(requests):
        raise ConfigError(f"{config.output}: {len(done)} answers, but {config.input} has {len(requests)} requests")
    serving = check(config.serving, num_processes, rank)
    return BatchJob(serving, config.output, requests[len(done) :], len(done))


def read_requests(path: Path) -> list[BatchRequest]:
    """Raises:
    ConfigError: no requests, or wrong lines.
    """
    found, problems, seen = list[BatchRequest](), list[str](), dict[str, int]()
    for number, line in enumerate(decode_text(path).split("\n"), 1):
        if not line.strip():
            continue
        request = _request(line)
        if isinstance(request, str):
            problems.append(f"{path}: line {number}: {request}")
        elif (first := seen.setdefault(request.custom_id, number)) != number:
            problems.append(f"{path}: line {number}: custom_id {shown(request.custom_id)} is that of line {first}, too")
        else:
            found.append(request)
    if len(problems) > MAX_SHOWN:
        problems[MAX_SHOWN:] = [f"{path}: {len(problems) - MAX_SHOWN} more wrong lines"]
    if problems or not found:
        raise ConfigError(problems or f"{path}: contains no request")
    return found


def _request(line: str) -> BatchRequest | str:
    """A request, or the reason why the line is not one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {first_line(error)[:200]}"
    if not isinstance(value, dict):
        return f"an object is needed, got {shown(value)}"
    name, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(name, str) or not name:
        return f"custom_id must be a text, got {shown(name)}"
    if value.get("method", "POST") != "POST":
        return f"method must be POST, got {shown(value['method'])}"
    if url not in URLS:
        return f"url must be one of {', '.join(URLS)}, got {shown(url)}"
    if not isinstance(body, dict):
        return f"body must be an object, got {shown(body)}"
    return "body.stream: answers are written complete" if body.get("stream") else BatchRequest(name, url, body)


def finished_ids(path: Path) -> list[str]:
    """The custom ids of an output's complete lines; a line that was cut off is removed from the file.

    Raises:
        ConfigError: it is not such a file.
    """
    if not path.exists():
        return []
    try:
        whole, end, cut = path.read_bytes().rpartition(b"\n")  # it may be cut within a character
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    found = list(_ids(path, whole)) if whole else []
    if cut:
        with path.open("r+b") as file:
            file.truncate(len(whole) + len(end))
    return found


def _ids(path: Path, lines: bytes) -> Iterator[str]:
    for number, line in enumerate(lines.split(b"\n"), 1):
        try:
            yield json.loads(line)["custom_id"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}: line {number} is not an answer of a batch; write to another file") from None
