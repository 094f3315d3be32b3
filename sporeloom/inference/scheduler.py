# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests share the rows of a batch, and start and end while others continue.

Every rank of a job has a scheduler of its own and makes the same calls in the same order; one rank chooses the tokens and
broadcasts them. The output of a request depends on the request alone.
"""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sporeloom.core.errors import ConfigError
from sporeloom.core.log import LogBudget
from sporeloom.inference.choosing import Choice, Chosen, packed, score_of, unpacked
from sporeloom.inference.decoding import Decoding, Logits
from sporeloom.inference.pooling import PooledStates
from sporeloom.inference.prefix_cache import PrefixCache
from sporeloom.inference.requests import (
    Event,
    Failure,
    FinishReason,
    InternalError,
    NewToken,
    PromptEmbedding,
    PromptScores,
    Request,
)
from sporeloom.inference.sampling import (
    BadLogitsError,
    GrammarError,
    History,
    NoTokenError,
    TokenScore,
    score_token,
)
from sporeloom.inference.speculation import Speculation
from sporeloom.runtime.engine import Engine

_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
_ERRORS = (NoTokenError, BadLogitsError, GrammarError, InternalError)


@dataclass
class _Row:
    """State of a busy row."""

    id: int
    request: Request
    left: Sequence[int]
    """Tokens of the prompt that the model has not read."""
    since: float
    cached_tokens: int = 0
    generated: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    """Scores of the prompt's tokens so far."""
    pooled: PooledStates | None = None
    """States for its embedding so far; on the choosing rank."""
    vector: Logits = field(default_factory=lambda: np.zeros(0, np.float32))
    error: Exception | None = None
    """Error that prevented scores of its prompt; on the choosing rank."""

    @property
    def to_read(self) -> Sequence[int]:
        """Tokens of the prompt that the model has still to read: all of them or, where nothing follows, all but
        the last token, which is only scored."""
        scored = self.request.score_prompt and len(self.request.prompt) > 1
        only_scored = scored and self.request.max_new_tokens == 0
        return self.left[:-1] if only_scored else self.left


class Scheduler:
    """Assigns rows to requests in the order of arrival, and runs all rows together.

    A step takes a chunk of the oldest prompt that is not prefilled yet, then one token further all rows that are. So a
    long prompt holds the others up by a chunk a token, and waits for no more than a token a chunk; short ones that end are
    taken at once where they are more than those that they hold up (`Decoding.next_chunks`). A prompt that begins like
    one that a free row still holds, or the prefix cache, continues from there.

    Args:
        cache: of prompts whose rows are in use again, or still.
        speculation: drafts of tokens.
    """

    def __init__(
        self,
        decoding: Decoding,
        engine: Engine,
        cache: PrefixCache | None = None,
        speculation: Speculation | None = None,
    ):
        self.decoding, self.engine, self.cache, self.speculation = decoding, engine, cache, speculation
        self._ids = itertools.count()
        self._log = LogBudget()
        self._waiting: dict[int, Request] = {}
        self._rows: dict[int, _Row] = {}
        self._free = list(range(decoding.num_rows))  # the least recently used one first
        self._held: dict[int, tuple[Hashable, Sequence[int]]] = dict.fromkeys(
            self._free, (None, ())
        )  # owner and tokens
        self.reused_tokens = 0
        """Number of prompt tokens that were found in a free row or in the prefix cache."""

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
        assert request.prompt and (request.max_new_tokens > 0 or request.score_prompt or request.pooling), request
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
        chunks, every = self._next_chunks(len(decoded))
        if not chunks and not decoded:
            return []
        if any(self._rows[row].request.pooling for row in chunks):
            rows, logits = self._embed(chunks)
            chunks = {}
        else:
            rows, logits = [], {}
        drafts = self._drafts(chunks, decoded)
        if chunks or decoded:
            found = self.decoding.step(chunks, decoded, every, drafts)
            logits = None if found is None or logits is None else {**logits, **found}
        rows = [*rows, *self._book(chunks, every, logits), *decoded]
        return self._choose({row: drafts.get(row, ()) for row in rows}, logits)

    def _embed(self, chunks: Mapping[int, Sequence[int]]) -> tuple[list[int], dict[int, Logits] | None]:
        """Read parts of texts to embed. Returns the rows whose texts are read, and their last states."""
        found, ended = self.decoding.states(chunks), []
        for row, chunk in chunks.items():
            state = self._rows[row]
            state.left = state.left[len(chunk) :]
            if found is not None and self.engine.is_log_rank:
                assert state.request.pooling
                state.pooled = state.pooled or PooledStates(state.request.pooling)
                state.pooled.add(found[row])
            if not state.left:
                ended.append(row)
        return ended, None if found is None else {row: found[row][-1] for row in ended}

    def _drafts(self, chunks: Mapping[int, Sequence[int]], rows: Collection[int]) -> Mapping[int, Sequence[int]]:
        """Drafts of what follows the last tokens of rows, none beyond the last token of a text."""
        if not self.speculation:
            return {}
        states = {row: self._rows[row] for row in rows}
        room = {row: state.request.max_new_tokens - len(state.generated) - 1 for row, state in states.items()}
        return self.speculation.draft(room, lambda drafts: self.decoding.cut_drafts(chunks, rows, drafts), not chunks)

    def _admit(self) -> None:
        for number, request in list(self._waiting.items()):
            if not self._free:
                return
            del self._waiting[number]
            shared = {row: self._shared(row, request) for row in self._free}
            found = {row: max(shared[row], self._cached(row, request)) for row in self._free}
            # Only reused tokens count, less those that are overwritten: a common greeting is not worth a conversation.
            row = max(self._free, key=lambda free: 2 * found[free] - len(self._held[free][1]))  # the first among equals
            self._free.remove(row)
            self.decoding.trim(row, shared[row])
            self.decoding.use_adapter(row, request.adapter)
            if self.cache is not None and found[row] > shared[row]:
                self.cache.restore(row, request.owner, request.prompt[:-1], shared[row])
            self.reused_tokens += found[row]
            left = request.prompt[found[row] :]
            self._rows[row] = _Row(number, request, left, time.perf_counter(), found[row])

    def _cached(self, row: int, request: Request) -> int:
        """Number of a prompt's tokens that the prefix cache has for a row, without the last one."""
        if self.cache is None or request.score_prompt or request.pooling:
            return 0
        return self.cache.num_found(row, request.owner, request.prompt[:-1])

    def _shared(self, row: int, request: Request) -> int:
        """Number of a prompt's tokens that a free row holds: full chunks, but never the last token, whose logits
        are needed."""
        unit, prompt, (owner, held) = self.decoding.reusable, request.prompt, self._held[row]
        if request.score_prompt or request.pooling or request.owner != owner:
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
        elif state.request.pooling:  # another graph has computed its keys and values
            pass
        elif unit == 1:  # the last token that was chosen has not been given to the model
            held = [*state.request.prompt[:done], *state.generated[:-1]]
        elif unit:
            held = state.request.prompt[: done // unit * unit]
        self._held[row] = state.request.owner, held
        if self.speculation:
            self.speculation.end(row)
        if self.cache is not None and state.generated and not failed:
            self.cache.keep(row, state.request.owner, held)
        self.decoding.trim(row, len(held))
        self._free.append(row)

    def _next_chunks(self, num_decoded: int) -> tuple[Mapping[int, Sequence[int]], bool]:
        """Parts of prompts for a step, and whether their tokens are scored: all or none."""
        waiting = {row: state for row, state in self._rows.items() if state.to_read}
        if not waiting:
            return {}, False
        every, pooling = (oldest := next(iter(waiting.values())).request).score_prompt, oldest.pooling
        alike = {
            row: state.to_read
            for row, state in waiting.items()
            if (state.request.score_prompt, state.request.pooling) == (every, pooling)
        }
        return self.decoding.next_chunks(alike, num_decoded), every

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

    def _choose(self, drafts: Mapping[int, Sequence[int]], logits: Mapping[int, Logits] | None) -> list[Event]:
        """Decide the next tokens of rows whose prompts are complete, each with its draft: on one rank, which broadcasts
        them."""
        if not drafts:
            return []
        sizes, chosen = [1 + len(draft) for draft in drafts.values()], None
        if logits is not None and self.engine.is_log_rank:
            chosen = [
                choose(self._rows[row], logits[row] if draft else logits[row][None], draft, self._log)
                for row, draft in drafts.items()
            ]
        told = packed(chosen or [Chosen(())] * len(sizes), sizes)
        told = self.engine.broadcast(told, self.engine.strategy.mesh.first_rank_of_last_stage)
        now, events = time.perf_counter(), list[Event]()
        for (row, draft), of_row in zip(drafts.items(), unpacked(told, sizes, chosen), strict=True):
            events += self._tell(row, now, draft, of_row)
        return events

    def _tell(self, row: int, now: float, draft: Sequence[int], chosen: Chosen) -> Iterator[Event]:
        """The events of a row, as broadcast; the row is free again where its text has ended."""
        state, is_first = self._rows[row], not self._rows[row].generated
        for choice in chosen.choices:
            if choice.code < 0:
                self._release(row, failed=True)
                yield Failure(state.id, _ERRORS[-1 - choice.code]())
                return
            reason = _REASONS[choice.code]
            if state.request.score_prompt and not state.generated:
                yield PromptScores(state.id, state.scores, None if state.request.max_new_tokens else reason)
            if state.request.pooling:
                yield PromptEmbedding(state.id, state.vector)
            if state.request.max_new_tokens:
                state.generated.append(choice.token)
                score, seconds = choice.log_probability, now - state.since
                yield NewToken(state.id, choice.token, score, seconds, reason, choice.top, state.cached_tokens)
                state.since = now
        if draft:  # tokens that were not chosen
            drop = self.decoding.trim if chosen.is_tail_finite else self.decoding.clear
            drop(row, len(state.request.prompt) + len(state.generated) - 1)
        tokens = [choice.token for choice in chosen.choices]
        if self.speculation:
            self.speculation.verified(row, draft, tokens)
        if chosen.choices[-1].code:
            self._release(row)
        elif is_first:
            self._begin(row, state.request, tokens)

    def _begin(self, row: int, request: Request, tokens: Sequence[int]) -> None:
        """After the first token of a row: its prompt is worth keeping, and drafts can be made."""
        if self.cache is not None:
            self.cache.keep(row, request.owner, request.prompt)
        if self.speculation:
            self.speculation.begin(row, [*request.prompt, *tokens])


def generate(
    decoding: Decoding, engine: Engine, requests: Sequence[Request], speculation: Speculation | None = None
) -> Iterator[NewToken]:
    """Tokens of all requests, by their index, in the order they are made. Every rank of a job yields the same.

    Rows left unfinished, when the caller stops early, are free again.

    Raises:
        ConfigError: a request fails; on every rank.
    """
    scheduler = Scheduler(decoding, engine, speculation=speculation)
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


def choose(state: _Row, logits: Logits, draft: Sequence[int], log: LogBudget) -> Chosen:
    """Choose the tokens after those of a row, from the logits (T, V) after the last one and after each drafted one: up to
    the first that is not as drafted."""
    choices, generated = list[Choice](), list(state.generated)
    for place, of_token in enumerate(logits):
        try:
            token, score, reason = _next_token(state, of_token, generated)
        except Exception as error:  # whatever it is, the other requests continue
            choices.append(Choice(0, 0.0, -1 - _kind_of(error, log)))
            break
        choices.append(score_of(score, token, _REASONS.index(reason)))
        if reason or place == len(draft) or token != draft[place]:
            break
    return Chosen(choices, bool(np.isfinite(logits[len(choices) :]).all()))


def _next_token(
    state: _Row, logits: Logits, generated: list[int]
) -> tuple[int, TokenScore | None, FinishReason | None]:
    """Choose the token after those generated, which are then one more, with its log-probability, and why it is the last one;
    where only the prompt is to be scored, none."""
    request = state.request
    if state.error:
        raise state.error
    if state.pooled:
        state.vector = state.pooled.vector()
    if not request.max_new_tokens:
        return 0, None, "length"
    token = request.sampler.choose(logits, History(request.prompt, generated), stream=request.stream)
    generated.append(token)
    score = score_token(logits, token, request.num_top) if request.has_scores else TokenScore(token, math.nan, ())
    return token, score, request.finish_reason(generated)


def _kind_of(error: Exception, log: LogBudget) -> int:
    """Number of the error in `_ERRORS` that is broadcast; any other exception is logged here."""
    for place, kind in enumerate(_ERRORS):
        if isinstance(error, kind):
            return place
    log.log("failed", f"a text failed: {''.join(traceback.format_exception(error))}")
    return _ERRORS.index(InternalError)
