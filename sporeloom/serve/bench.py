# SPDX-License-Identifier: Apache-2.0
"""Load generator for servers with OpenAI's completions, plain or chat; flags and metrics follow vLLM."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import httpx
import numpy as np

from sporeloom.core.command_line import Overwrite, option, output
from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import stream_lines
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, Seed
from sporeloom.data.documents import decode_text, json_lines

LIMITS = ("ttft", "tpot", "e2el")
TIMEOUT_S = 600.0
_DRAFTED = re.compile(r"^\w+:spec_decode_num_(draft|accepted)_tokens_total(?:\{.*\})? (\S+)$", re.M)
"""Counters of servers that draft, vLLM's among them."""


@dataclass(frozen=True, kw_only=True)
class BenchServeConfig(Overwrite):
    """One call of `sporeloom bench-serve`."""

    common: ClassVar[tuple[str, ...]] = (
        "overwrite",
        "base_url",
        "model",
        "api_key",
        "dataset_path",
        "input_len",
        "output_len",
        "num_prompts",
        "request_rate",
        "max_concurrency",
        "save_result",
    )

    base_url: str = option("http://127.0.0.1:8000", "URL of the server")
    endpoint: str = option("/v1/completions", "API path; /v1/chat/completions takes prompts from a file")
    model: str | None = option(None, "name of the model (default: the first of /v1/models)")
    api_key: str | None = option(None, "key that is sent as `Authorization: Bearer KEY` (default: none)")
    dataset_name: Literal["random", "custom"] = option(
        "random", "data set of prompts: random (token ids), or custom (prompts from --dataset-path)"
    )
    dataset_path: Path | None = option(None, ".jsonl file with a `prompt` field (default: none)")
    input_len: Count = option(64, "number of tokens in a random prompt")
    random_prefix_len: Natural = option(
        0, "number of tokens that all random prompts begin with, before --input-len others: a prefix cache has them"
    )
    output_len: Count = option(64, "number of tokens to generate")
    vocab_size: Count = option(256, "exclusive upper bound of random token ids")
    num_prompts: Count = option(64, "number of measured requests")
    num_warmups: Natural = option(2, "number of warm-up requests before the measured ones")
    request_rate: Positive | None = option(None, "requests per second (default: all at once)")
    burstiness: Positive = option(
        1.0, "shape of the gamma distribution of the intervals between requests; 1: Poisson arrivals"
    )
    max_concurrency: Count | None = option(None, "maximum number of concurrent requests (default: unlimited)")
    temperature: NotNegative = option(0.0, "sampling temperature")
    ignore_eos: bool = option(False, "generate past the end of a document")
    goodput: tuple[str, ...] = option(
        (), "limits in ms for a request to count as good, as ttft:200 tpot:50 e2el:5000 (default: none)"
    )
    metric_percentiles: tuple[float, ...] = option((50.0, 99.0), "percentiles to print")
    seed: Seed = option(0, "random seed of prompts and arrival times")
    save_result: Path | None = output(None, "JSON file to write (default: none)")


@dataclass
class RequestTimes:
    """The measurements of one request."""

    prompt_tokens: int
    latency: float = 0.0
    chunks: list[float] = field(default_factory=list)
    """Arrival time of each token, in seconds after the request."""
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.chunks[0]

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.latency - self.ttft) / max(1, self.tokens - 1)


def limits_of(config: BenchServeConfig) -> dict[str, float]:
    """Read --goodput, in seconds.

    Raises:
        ConfigError: something else than names and numbers.
    """
    limits = {}
    for text in config.goodput:
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value) / 1000
        except ValueError:
            limits[name] = -1.0
        if name not in LIMITS or not limits[name] > 0:
            raise ConfigError(f"--goodput {text}: expected NAME:MS, NAME one of {', '.join(LIMITS)}")
    return limits


def is_chat(config: BenchServeConfig) -> bool:
    return config.endpoint.rstrip("/").endswith("/chat/completions")


def prompts_of(config: BenchServeConfig) -> list[Any]:
    """List the prompts: texts or lists of token ids.

    Raises:
        ConfigError: no such file, or nothing in it.
    """
    if config.dataset_name == "random" and is_chat(config):
        raise ConfigError(f"{config.endpoint} takes texts: give --dataset-name custom --dataset-path FILE")
    if config.dataset_name == "custom":
        if config.dataset_path is None:
            raise ConfigError("--dataset-name custom needs --dataset-path")
        found = [text for _, text in json_lines(config.dataset_path, decode_text(config.dataset_path), "prompt")]
        if not found:
            raise ConfigError(f"{config.dataset_path}: contains no prompt")
        return [found[i % len(found)] for i in range(config.num_prompts)]
    draw = np.random.default_rng(config.seed)
    low = min(10, config.vocab_size - 1)
    own = draw.integers(low, config.vocab_size, (config.num_prompts, config.input_len)).tolist()
    shared = draw.integers(low, config.vocab_size, config.random_prefix_len).tolist()
    return [shared + prompt for prompt in own]


async def bench(config: BenchServeConfig) -> dict[str, Any]:
    """Send the requests and measure them.

    Raises:
        ConfigError: the server cannot be reached or answers nothing.
    """
    limits, prompts = limits_of(config), prompts_of(config)
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    connections = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=config.base_url, headers=headers, timeout=TIMEOUT_S, limits=connections
    ) as client:
        model = config.model or await _model(client, config)
        for prompt in prompts[: config.num_warmups]:
            warm = await _ask(client, config, model, prompt)
            if warm.error:
                raise ConfigError(f"{config.base_url}{config.endpoint}: {warm.error}")
        gate = asyncio.Semaphore(config.max_concurrency or len(prompts))

        async def gated(prompt: Any) -> RequestTimes:
            async with gate:
                return await _ask(client, config, model, prompt)

        before, start, tasks = await _drafted(client), time.perf_counter(), []
        async for prompt in _arrivals(config, prompts):
            tasks.append(asyncio.ensure_future(gated(prompt)))
        timed = await asyncio.gather(*tasks)
        told = summary(config, model, timed, time.perf_counter() - start, limits)
        drafted, accepted = (after - first for after, first in zip(await _drafted(client), before, strict=True))
        if drafted:
            told |= {"spec_decode_draft_tokens": drafted, "spec_decode_acceptance_rate": accepted / drafted}
        return told


async def _model(client: httpx.AsyncClient, config: BenchServeConfig) -> str:
    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(f"{config.base_url}/v1/models: {error}; is a server there?") from None


async def _drafted(client: httpx.AsyncClient) -> tuple[float, float]:
    """Numbers of drafted and of accepted tokens that the server's metrics have; 0 where it has none."""
    try:
        answer = await client.get("/metrics")
    except httpx.HTTPError:
        return 0.0, 0.0
    counts = dict.fromkeys(("draft", "accepted"), 0.0)
    if answer.status_code == 200:
        for kind, value in _DRAFTED.findall(answer.text):
            counts[kind] += float(value)
    return counts["draft"], counts["accepted"]


async def _arrivals(config: BenchServeConfig, prompts: Sequence[Any]) -> AsyncIterator[Any]:
    draw = np.random.default_rng(config.seed + 1)
    for prompt in prompts:
        yield prompt
        if config.request_rate:
            await asyncio.sleep(draw.gamma(config.burstiness, 1 / (config.request_rate * config.burstiness)))


async def _ask(client: httpx.AsyncClient, config: BenchServeConfig, model: str, prompt: Any) -> RequestTimes:
    timed, start = RequestTimes(len(prompt)), time.perf_counter()
    asked = {"messages": [{"role": "user", "content": prompt}]} if is_chat(config) else {"prompt": prompt}
    body = {"model": model, **asked, "max_tokens": config.output_len, "temperature": config.temperature}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"ignore_eos": True} if config.ignore_eos else {}  # OpenAI's own fields do not have it
    try:
        async with client.stream("POST", config.endpoint, json=body) as answer:
            if answer.status_code != 200:
                timed.error = f"{answer.status_code} {(await answer.aread()).decode(errors='replace')[:200]}"
                return timed
            async for line in stream_lines(answer.aiter_bytes()):
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    timed.error = str(event["error"])
                elif event["choices"] and _has_tokens(event["choices"][0]):
                    timed.chunks.append(time.perf_counter() - start)
                if usage := event.get("usage"):
                    timed.tokens, timed.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    except (httpx.HTTPError, ValueError) as error:
        timed.error = f"{type(error).__name__}: {error}"
    timed.latency = timed.chunks[-1] if timed.chunks else time.perf_counter() - start
    timed.tokens = timed.tokens or len(timed.chunks)  # of a server that does not count them
    timed.error = timed.error or ("" if timed.chunks else "no token came")
    return timed


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether an event has part of an answer; the first and last ones of a chat may have none."""
    delta = choice.get("delta")
    return delta is None or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))


def summary(
    config: BenchServeConfig, model: str, timed: Sequence[RequestTimes], seconds: float, limits: dict[str, float]
) -> dict[str, Any]:
    """Summarize the measurements; times in ms."""
    good = [each for each in timed if not each.error]
    told: dict[str, Any] = {
        "model": model,
        "duration_s": seconds,
        "completed": len(good),
        "failed": len(timed) - len(good),
        "errors": sorted({each.error for each in timed if each.error})[:5],
        "total_input_tokens": sum(each.prompt_tokens for each in good),
        "total_output_tokens": sum(each.tokens for each in good),
        "request_throughput": len(good) / seconds,
        "output_throughput": sum(each.tokens for each in good) / seconds,
        "total_token_throughput": sum(each.tokens + each.prompt_tokens for each in good) / seconds,
    }
    if limits:
        kept = [
            all({"ttft": e.ttft, "tpot": e.tpot, "e2el": e.latency}[n] <= s for n, s in limits.items()) for e in good
        ]
        told["request_goodput"] = sum(kept) / seconds
    times = {
        "ttft": [each.ttft for each in good],
        "tpot": [each.tpot for each in good if each.tokens > 1],
        "itl": [later - earlier for each in good for earlier, later in zip(each.chunks, each.chunks[1:], strict=False)],
        "e2el": [each.latency for each in good],
    }
    for name, values in times.items():
        if values:
            told[f"mean_{name}_ms"] = float(np.mean(values)) * 1000
            for percentile in config.metric_percentiles:
                told[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile)) * 1000
    return told
