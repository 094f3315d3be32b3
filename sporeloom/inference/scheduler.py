# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests share the rows of a batch, and start and end while others continue.

Every rank of a job has a scheduler of its own and makes the same calls in the same order; one rank chooses the tokens and
broadcasts them. The output of a request depends on the request alone.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sporeloom.core.errors import ConfigError
from sporeloom.core.log import LogBudget
from sporeloom.inference.decoding import Decoding, Logits
from sporeloom.inference.sampling import (
    BadLogitsError,
    GrammarError,
    History,
    NoTokenError,
    Sampler,
    TokenScore,
    score_token,
)
from sporeloom.runtime.engine import Engine

FinishReason = Literal["stop", "length"]
_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


class InternalError(ConfigError):
    """A bug of this package while a request was served; the log of the choosing rank has the details."""

    def __init__(self) -> None:
        super().__init__("a bug of sporeloom ended this text; see the log")


_ERRORS = (NoTokenError, BadLogitsError, GrammarError, InternalError)


@dataclass(frozen=True)
class Request:
    """One prompt and its options."""

    prompt: Sequence[int]
    max_new_tokens: int
    """Maximum number of new tokens; 0 with `score_prompt` only."""
    sampler: Sampler
    is_finished: Callable[[Sequence[int]], bool]
    """Called after each token with all generated ones, on the choosing rank: whether the text ends."""
    stream: int = 0
    """Number that separates its random numbers from those of other requests with the same seed."""
    num_top: int = 0
    """Number of most likely tokens to report with each token."""
    score_prompt: bool = False
    """Report the log-probability of each token of the prompt but the first."""
    adapter: int = 0
    """Number of its adapter, counted from 1; 0: none."""


@dataclass(frozen=True)
class NewToken:
    """One generated token."""

    request: int
    """Number of the request, from `submit`."""
    token: int
    log_probability: float
    """Log-probability under the model itself, before penalties, temperature and other processors."""
    seconds: float
    """Seconds since the token before; for the first one, since the prompt got a row."""
    finish_reason: FinishReason | None
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log-probabilities; on the choosing rank."""


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, from the second on. Precedes the first new token."""

    request: int
    scores: Sequence[TokenScore]
    """On the choosing rank; empty on the others."""
    finish_reason: FinishReason | None
    """Set where no new token is requested."""


@dataclass(frozen=True)
class Failure:
    """The last event of a request that failed, on every rank. The others continue."""

    request: int
    error: ConfigError


Event = NewToken | PromptScores | Failure


@dataclass
class _Row:
    """State of a busy row."""

    id: int
    request: Request
    left: Sequence[int]
    """Scores of the prompt's tokens so far."""
    since: float
    generated: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    error: Exception | None = None
    """Error that prevented scores of its prompt; on the choosing rank."""

    @property
    def to_read(self) -> Sequence[int]:
        """Tokens of the prompt that the model has still to read: all of them or, where nothing follows, all but
        the last token, which is only scored."""
        only_scored = self.request.max_new_tokens == 0 and len(self.request.prompt) > 1
        return self.left[:-1] if only_scored else self.left


class Scheduler:
    """Assigns rows to requests in the order of arrival, and runs all rows together.

    A step takes a chunk of the oldest prompt that is not prefilled yet, then one token further all rows that are. So a
    long prompt holds the others up by a chunk a token, and waits for no more than a token a chunk. A prompt that begins like
    one that a free row still holds continues from there.
    """

    def __init__(self, decoding: Decoding, engine: Engine):
        self.decoding, self.engine = decoding, engine
        self._ids = itertools.count()
        self._log = LogBudget()
        self._waiting: dict[int, Request] = {}
        self._rows: dict[int, _Row] = {}
        self._free = list(range(decoding.num_rows))  # the least recently used one first
        self._held: dict[int, tuple[int, Sequence[int]]] = dict.fromkeys(self._free, (0, ()))  # adapter and tokens
        self.reused_tokens = 0
        """Number of prompt tokens that were found in a free row."""

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._rows

    def submit(self, request: Request) -> int:
        """Queue a request. Returns its number, counted from 0."""
        assert request.prompt and (request.max_new_tokens > 0 or request.score_prompt), request
        number = next(self._ids)
        self._waiting[number] = request
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request; its row is free for the next step."""
        self._waiting.pop(number, None)
        for row, state in list(self._rows.items()):
            if state.id == number:
                self._release(row)

    def cancel_all(self) -> None:
        """Cancel all requests."""
        self._waiting.clear()
        for row in list(self._rows):
            self._release(row)

    def step(self) -> list[Event]:
        """Run a step: a chunk of a prompt, and a further token of each row. Returns its events."""
        self._admit()
        decoded = {row: state.generated[-1] for row, state in self._rows.items() if state.generated}
        chunks, every = self._next_chunks(is_alone=not decoded)
        if not chunks and not decoded:
            return []
        logits = self.decoding.step(chunks, decoded, every)
        return self._choose([*self._book(chunks, every, logits), *decoded], logits)

    def _admit(self) -> None:
        for number, request in list(self._waiting.items()):
            if not self._free:
                return
            del self._waiting[number]
            shared = {row: self._shared(row, request) for row in self._free}
            # Only reused tokens count, less those that are overwritten: a common greeting is not worth a conversation.
            row = max(
                self._free, key=lambda free: 2 * shared[free] - len(self._held[free][1])
            )  # the first among equals
            self._free.remove(row)
            self.decoding.trim(row, shared[row])
            self.decoding.use_adapter(row, request.adapter)
            self.reused_tokens += shared[row]
            self._rows[row] = _Row(number, request, request.prompt[shared[row] :], time.perf_counter())

    def _shared(self, row: int, request: Request) -> int:
        """Number of a prompt's tokens that a free row holds: full chunks, but never the last token, whose logits
        are needed."""
        unit, prompt, (adapter, held) = self.decoding.reusable, request.prompt, self._held[row]
        if request.score_prompt or request.adapter != adapter:
            return 0
        if not unit:
            return 0
        pairs = zip(held, prompt[:-1], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return same // unit * unit

    def _release(self, row: int, failed: bool = False) -> None:
        state, unit = self._rows.pop(row), self.decoding.reusable
        done = len(state.request.prompt) - len(state.left)
        held: Sequence[int] = ()
        if failed:  # NaN among its keys and values would reach the next request, though it is hidden there
            self.decoding.clear(row)
        elif unit == 1:  # the last token that was chosen has not been given to the model
            held = [*state.request.prompt[:done], *state.generated[:-1]]
        elif unit:
            held = state.request.prompt[: done // unit * unit]
        self._held[row] = state.request.adapter, held
        self.decoding.trim(row, len(held))
        self._free.append(row)

    def _next_chunks(self, is_alone: bool) -> tuple[Mapping[int, Sequence[int]], bool]:
        """Parts of prompts for a step, and whether their tokens are scored: all or none."""
        waiting = {row: state for row, state in self._rows.items() if state.to_read}
        if not waiting:
            return {}, False
        every = next(iter(waiting.values())).request.score_prompt
        alike = {row: state.to_read for row, state in waiting.items() if state.request.score_prompt == every}
        return self.decoding.next_chunks(alike, is_alone), every

    def _book(self, chunks: Mapping[int, Sequence[int]], every: bool, logits: dict[int, Logits] | None) -> list[int]:
        """Record parts of prompts. Returns the rows whose prompts are complete; only the logits of their last
        tokens are left."""
        ended = []
        for row, chunk in chunks.items():
            state = self._rows[row]
            if every:
                self._score(state, chunk, None if logits is None else logits[row])
                if logits is not None:
                    logits[row] = logits[row][-1]
            state.left = state.left[len(chunk) :]
            if not state.to_read:
                ended.append(row)
        return ended

    def _score(self, state: _Row, chunk: Sequence[int], logits: Logits | None) -> None:
        """Record log-probabilities of the tokens after those of a chunk."""
        if logits is None or not self.engine.is_log_rank:
            return
        followers = list(state.left[1 : len(chunk) + 1])
        try:
            state.scores += [
                score_token(row, token, state.request.num_top) for row, token in zip(logits, followers, strict=False)
            ]
        except Exception as error:  # of this request alone
            state.error = state.error or error

    def _choose(self, rows: Sequence[int], logits: Mapping[int, Logits] | None) -> list[Event]:
        """Decide the next tokens of rows whose prompts are complete: on one rank, which broadcasts them."""
        if not rows:
            return []
        told = np.zeros((3, len(rows)), np.int32)  # token, log-probability as bits, why it ended or, negative, failed
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
        if logits is not None and self.engine.is_log_rank:
            for place, row in enumerate(rows):
                try:
                    token, score, reason = _next_token(self._rows[row], logits[row])
                except Exception as error:  # whatever it is, the other requests continue
                    told[2, place] = -1 - _kind_of(error, self._log)
                    continue
                if score:
                    tops[place], told[:2, place] = score.top, (token, np.float32(score.log_probability).view(np.int32))
                told[2, place] = _REASONS.index(reason)
        told = self.engine.broadcast(told, self.engine.strategy.mesh.first_rank_of_last_stage)
        now, events = time.perf_counter(), list[Event]()
        for place, row in enumerate(rows):
            token, bits, code = told[:, place]
            events += self._tell(row, now, (int(token), float(bits.view(np.float32)), int(code)), tops[place])
        return events

    def _tell(
        self, row: int, now: float, told: tuple[int, float, int], top: tuple[tuple[int, float], ...]
    ) -> Iterator[Event]:
        """The events of a row, as broadcast; the row is free again where its text has ended."""
        token, log_probability, code = told
        state = self._rows[row]
        if code < 0:
            self._release(row, failed=True)
            yield Failure(state.id, _ERRORS[-1 - code]())
            return
        reason = _REASONS[code]
        if state.request.score_prompt and not state.generated:
            yield PromptScores(state.id, state.scores, None if state.request.max_new_tokens else reason)
        if state.request.max_new_tokens:
            state.generated.append(token)
            yield NewToken(state.id, token, log_probability, now - state.since, reason, top)
            state.since = now
        if reason:
            self._release(row)


def generate(decoding: Decoding, engine: Engine, requests: Sequence[Request]) -> Iterator[NewToken]:
    """Tokens of all requests, by their index, in the order they are made. Every rank of a job yields the same.

    Rows left unfinished, when the caller stops early, are free again.

    Raises:
        ConfigError: a request fails; on every rank.
    """
    scheduler = Scheduler(decoding, engine)
    for request in requests:
        scheduler.submit(request)
    try:
        while not scheduler.is_idle:
            for event in scheduler.step():
                if isinstance(event, Failure):
                    raise ConfigError(f"text {event.request + 1} of {len(requests)}: {event.error}")
                if isinstance(event, NewToken):
                    yield event
    finally:
        scheduler.cancel_all()
        for row in range(decoding.num_rows):
            decoding.trim(row, 0)


def _next_token(state: _Row, logits: Logits) -> tuple[int, TokenScore | None, FinishReason | None]:
    """Choose the token after those of a row, with its log-probability, and why it is the last one; where only the prompt
    is to be scored, none."""
    request = state.request
    if state.error:
        raise state.error
    if not request.max_new_tokens:
        return 0, None, "length"
    token = request.sampler.choose(logits, History(request.prompt, state.generated), stream=request.stream)
    return token, score_token(logits, token, request.num_top), _finish_reason(request, [*state.generated, token])


def _kind_of(error: Exception, log: LogBudget) -> int:
    """Number of the error in `_ERRORS` that is broadcast; any other exception is logged here."""
    for place, kind in enumerate(_ERRORS):
        if isinstance(error, kind):
            return place
    log.log("failed", f"a text failed: {''.join(traceback.format_exception(error))}")
    return _ERRORS.index(InternalError)


def _finish_reason(request: Request, generated: Sequence[int]) -> FinishReason | None:
    if request.is_finished(generated):
        return "stop"
    return "length" if len(generated) >= request.max_new_tokens else None
