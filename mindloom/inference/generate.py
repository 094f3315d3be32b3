# SPDX-License-Identifier: Apache-2.0
"""Prompts in, tokens out, one by one: rows take waiting prompts as they become free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mindloom.inference.decoding import Decoding, Logits
from mindloom.inference.sampling import History, Sampler, log_probability
from mindloom.runtime.engine import Engine

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One prompt and what is wanted of it."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampler: Sampler
    is_finished: Callable[[Sequence[int]], bool]
    """Asked after each token, with all generated ones."""
    stream: int
    """Sets its random numbers apart from those of other requests."""


@dataclass(frozen=True)
class NewToken:
    """One generated token."""

    request: int
    """Which of the requests it continues."""
    token: int
    log_probability: float
    """Under the model itself, before penalties, temperature and the rest."""
    seconds: float
    """Of the step that made it; the first one's is the prefill."""
    finish_reason: FinishReason | None


@dataclass
class _Row:
    request: int
    generated: list[int] = field(default_factory=list)


def generate(decoding: Decoding, engine: Engine, requests: Sequence[Request]) -> Iterator[NewToken]:
    """Tokens of all requests, in the order they are made. Every rank of a job yields the same.

    What a request gets does not depend on the others in the batch. Rows left unfinished, when the caller stops early,
    are reset.
    """
    waiting = deque(range(len(requests)))
    rows: dict[int, _Row] = {}
    try:
        while waiting or rows:
            start = time.perf_counter()
            fresh = {}
            for row in range(decoding.num_rows):
                if row not in rows and waiting:
                    rows[row] = _Row(waiting.popleft())
                    fresh[row] = requests[rows[row].request].prompt
            feed = fresh or {row: state.generated[-1:] for row, state in rows.items()}
            logits = decoding.extend(feed)
            chosen = _choose(logits, {row: rows[row] for row in feed}, requests, engine)
            seconds = time.perf_counter() - start
            for row, (token, log_prob) in zip(feed, chosen, strict=True):
                state = rows[row]
                state.generated.append(token)
                reason = _finish_reason(requests[state.request], state.generated)
                if reason:
                    del rows[row]
                    decoding.reset(row)
                yield NewToken(state.request, token, log_prob, seconds, reason)
    finally:
        for row in rows:
            decoding.reset(row)


def _choose(
    logits: Logits | None, rows: dict[int, _Row], requests: Sequence[Request], engine: Engine
) -> list[tuple[int, float]]:
    """Token and log-probability for each row: chosen by one rank, told to all."""
    tokens, log_probs = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.float32)
    if logits is not None and engine.is_log_rank:
        for place, (row, state) in enumerate(rows.items()):
            request = requests[state.request]
            history = History(request.prompt, state.generated)
            tokens[place] = request.sampler.choose(logits[row], history, stream=request.stream)
            log_probs[place] = log_probability(logits[row], int(tokens[place]))
    both: NDArray[np.int32] = np.concatenate([tokens, log_probs.view(np.int32)])
    both = engine.broadcast(both, engine.strategy.mesh.first_rank_of_last_stage)
    tokens, log_probs = both[: len(rows)], both[len(rows) :].view(np.float32)
    return [(int(token), float(log_prob)) for token, log_prob in zip(tokens, log_probs, strict=True)]


def _finish_reason(request: Request, generated: list[int]) -> FinishReason | None:
    if request.is_finished(generated):
        return "stop"
    return "length" if len(generated) >= request.max_new_tokens else None
