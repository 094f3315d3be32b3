# SPDX-License-Identifier: Apache-2.0
"""Drafts by the model's own layers of multi-token prediction.

For the tokens t[0] to t[n], of which the model has read all but the last, depth d computes at each position i up to n - 1
from the state of the depth before, or of the model, and the token t[i + d + 1] the logits of t[i + d + 2]. So each depth
drafts a token, the one after that of the depth before, and the numbers are those of training.

Further tokens are drafted by the last depth again, one position on each, from its own state at the position before in place
of the state of the depth before. Source: arXiv:2401.15077 (EAGLE, section 4.1), as vLLM and SGLang do with the one layer of
DeepSeek-V3.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.log import milestone
from sporeloom.inference.decoding import PREFILL_CHUNK, CacheDecoder, as_tensors, bucket
from sporeloom.inference.draft_length import DraftLength
from sporeloom.inference.model import CACHE
from sporeloom.inference.slot_memory import SlotMemory
from sporeloom.inference.speculation import Drafter
from sporeloom.models.parts.multi_token_prediction import PREFIX
from sporeloom.nn.decoder import DraftStep

NOTHING = -1


class Span(NamedTuple):
    """Consecutive positions of a row that a depth computes."""

    start: int
    tokens: Sequence[int]
    """The tokens depth + 1 positions on."""
    targets: Sequence[int]
    """Slots of the states of the next depth, or of the last one itself."""


@dataclass
class _Row:
    """State of a row."""

    text: list[int]
    read: list[int]
    """Number of positions of each depth that are computed from tokens of the text alone."""


class MTPDrafter(Drafter):
    """Drafts the most likely tokens of each depth. Every rank computes its shard, and one rank chooses.

    A prompt is read in parts, one with each call of `propose`, so that a long one holds up no other row; until it is read
    there are no drafts for it.

    Args:
        decoding: of the model, whose network keeps states for drafts.
        most: tokens of a draft, at most.
    """

    is_costly = True

    def __init__(self, decoding: CacheDecoder, most: int):
        net, config = decoding.net, decoding.config
        assert net.drafts, net
        self._decoding, self._engine, self._table = decoding, decoding.engine, decoding.slot_table
        self._depths = [DraftStep(net, depth).set_train(False) for depth in range(config.num_mtp_layers)]
        self._all = range(decoding.num_rows)
        self._in_replica = decoding.num_rows // decoding.num_replicas
        self._chunk = min(PREFILL_CHUNK, config.seq_len)
        self._window = min(bucket(1 + most + len(self._depths), config.seq_len), self._chunk)
        """Positions that a draft computes at once, at most."""
        self._memory = SlotMemory(self._engine, net, PREFIX)
        self._rows: dict[int, _Row] = {}
        self._length = DraftLength()
        self._is_prepared = False

    def prepare(self) -> None:
        if self._is_prepared:
            return
        self._is_prepared = True
        for step in self._depths:
            for rows, length in ((self._all, self._window), (self._firsts({}), self._chunk)):
                self._engine.prepare(step, *as_tensors(self._inputs(rows, {}, length)))
        held = [each for each in self._decoding.net.get_parameters() if each.name.startswith(PREFIX)]
        weights, caches = (sum(each.nbytes for each in held if (CACHE in each.name) is of) for of in (False, True))
        milestone(
            f"multi-token prediction: {len(self._depths)} layers, {weights / 2**20:.1f} MiB of weights, "
            f"caches {caches / 2**20:.1f} MiB"
        )

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self._rows[row] = _Row(list(tokens), [0] * len(self._depths))

    def add(self, row: int, tokens: Sequence[int]) -> None:
        if state := self._rows.get(row):
            state.text += tokens

    def end(self, row: int) -> None:
        self._rows.pop(row, None)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        self._length.stepped(num_tokens, seconds)

    def verified(self, num_drafted: int, num_right: int) -> None:
        self._length.verified(num_drafted, num_right)

    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        known = [row for row in counts if row in self._rows]
        most = self._length.best(len(known), max((counts[row] for row in known), default=0))
        most = int(self._broadcast(np.array([most], np.int32))[0])  # it depends on measured times
        if not most:
            return {}
        is_timed = not self._read_on(known)
        begin = time.perf_counter()
        drafts: dict[int, list[int]] = {row: [] for row in known if self._num_unread(row) <= self._window}
        wanted = {row: min(most, counts[row]) for row in drafts}
        num_steps = max(wanted.values(), default=0)
        for number in range(num_steps):
            spans = {row: self._span(row, drafts[row]) for row in drafts if len(drafts[row]) == number < wanted[row]}
            found = self._run(min(number, len(self._depths) - 1), spans, self._all, self._window)
            for row, token in found.items():
                if token == NOTHING:
                    self._give_up(row)
                else:
                    drafts[row].append(token)
        if is_timed and num_steps:
            self._length.drafted(len(drafts), num_steps, time.perf_counter() - begin)
        return {row: draft for row, draft in drafts.items() if draft}

    def _num_unread(self, row: int) -> int:
        """Positions that a draft has to compute in a depth, at most."""
        state = self._rows[row]
        return len(state.text) - 1 - min(state.read)

    def _read_on(self, rows: Sequence[int]) -> bool:
        """Read a part of the oldest text of each replica of which too much is unread. Returns whether there is one."""
        reading: dict[int, int] = {}
        for row in rows:
            if self._num_unread(row) > self._window:
                reading.setdefault(row // self._in_replica, row)
        stops = {row: len(self._rows[row].text) for row in reading.values()}
        for depth in range(len(self._depths)):
            spans = {}
            for row in stops:
                state = self._rows[row]
                start = state.read[depth]
                stops[row] = max(start, min(stops[row] - 1, start + self._chunk))
                if stops[row] > start:
                    tokens = state.text[start + depth + 1 : stops[row] + depth + 1]
                    spans[row] = Span(start, tokens, self._targets(depth, range(start, stops[row])))
                    state.read[depth] = stops[row]
            if spans:
                self._run(depth, spans, self._firsts(reading), self._chunk)
        return bool(reading)

    def _firsts(self, chosen: Mapping[int, int]) -> list[int]:
        """A row of each replica: the chosen one, or its first."""
        return [chosen.get(replica, replica * self._in_replica) for replica in range(self._decoding.num_replicas)]

    def _targets(self, depth: int, slots: Sequence[int]) -> Sequence[int]:
        """Slots for states of the text: the last depth's are read by none."""
        return slots if depth + 1 < len(self._depths) else [self._table.capacity] * len(slots)

    def _span(self, row: int, draft: Sequence[int]) -> Span:
        """Positions to compute for the token after a draft: all that no text was known for, or by the last depth again one
        more."""
        state, last = self._rows[row], len(self._depths) - 1
        depth, end = min(len(draft), last), len(state.text) - 1
        tokens = [*state.text, *draft]
        if again := len(draft) - depth:
            return Span(end - 1 + again, tokens[-1:], [min(end + again, self._table.capacity)])
        start = min(state.read[depth], end - 1)
        targets = [*self._targets(depth, range(start, end))]
        if depth == last:
            targets[-1] = end
        state.read[depth] = max(start, end - depth)
        return Span(start, tokens[start + depth + 1 : end + depth + 1], targets)

    def _run(self, depth: int, spans: Mapping[int, Span], rows: Sequence[int], length: int) -> dict[int, int]:
        """Compute positions of a depth. Returns the most likely token after each, or NOTHING where there is no number."""
        output = self._engine.run(self._depths[depth], *as_tensors(self._inputs(rows, spans, length)))
        tokens = np.full(len(rows), NOTHING, np.int32)
        if self._engine.is_log_rank:
            logits = output.asnumpy()
            tokens = np.where(np.isfinite(logits).all(1), logits.argmax(1), NOTHING).astype(np.int32)
        tokens = self._broadcast(tokens)
        return {row: int(token) for row, token in zip(rows, tokens, strict=True) if row in spans}

    def _broadcast(self, array: NDArray[np.int32]) -> NDArray[np.int32]:
        return self._engine.broadcast(array, self._engine.strategy.mesh.first_rank_of_last_stage)

    def _inputs(self, rows: Sequence[int], spans: Mapping[int, Span], length: int) -> tuple[NDArray[Any], ...]:
        """Inputs of a `DraftStep` for some rows. Padding goes to the spare slot."""
        tokens, positions = np.zeros((2, len(rows), length), np.int64)
        slots, targets = np.full((2, len(rows), length), self._table.capacity)
        last = np.zeros(len(rows), np.int64)
        for place, row in enumerate(rows):
            if span := spans.get(row):
                count = len(span.tokens)
                tokens[place, :count], targets[place, :count] = span.tokens, span.targets
                positions[place, :count] = slots[place, :count] = np.arange(span.start, span.start + count)
                last[place] = count - 1
        picked = np.arange(len(rows)) % (len(rows) // self._decoding.num_replicas) * length + last
        of_keys, of_targets = self._table.indices(rows, slots), self._table.indices(rows, targets)
        return tokens, positions, picked, of_keys, of_keys[:, :1], of_targets[:, :1]

    def _give_up(self, row: int) -> None:
        """Leave a text alone that makes the logits NaN or infinite; what it left is overwritten for the next one."""
        del self._rows[row]
        self._memory.clear(row, 0)
