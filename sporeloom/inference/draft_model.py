# SPDX-License-Identifier: Apache-2.0
"""Drafts by a small model: its most likely tokens.

The rank that chooses tokens holds the small model unsharded, computes the drafts and broadcasts them. So all ranks have
the same ones, and no strategy needs to fit that model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from sporeloom.core.log import milestone
from sporeloom.inference.decoding import CachedDecoder, CacheDecoder
from sporeloom.inference.draft_length import DraftLength
from sporeloom.inference.mixed import RaggedDecoder, cached
from sporeloom.inference.model import CACHE, load_model
from sporeloom.inference.mtp_drafter import MTPDrafter
from sporeloom.inference.speculation import Drafter, NgramDrafter, Speculation
from sporeloom.inference.speculation_config import DraftModel, SpeculationFlags
from sporeloom.runtime.engine import Engine

CATCH_UP = 2
"""Tokens of a text that are new to the model after a draft of which all were right: its last one, and the one after it."""
NOTHING = -1


@dataclass
class _Row:
    """State of a row."""

    text: list[int]
    num_read: int = 0
    """Number of the text's tokens that the model has read."""
    ahead: list[int] = field(default_factory=list)
    """Drafted tokens that it has read after them."""


class ModelDrafter(Drafter):
    """Drafts the most likely tokens of a model, which reads the texts in rows of a KV cache of its own.

    A prompt is read in parts, one with each call of `propose`, so that a long one holds up no other row; until it is read
    there are no drafts for it.
    """

    is_costly = True

    def __init__(self, decoding: CachedDecoder | RaggedDecoder):
        self._decoding, self.cache_bytes = decoding, decoding.cache_bytes
        self._rows: dict[int, _Row] = {}
        self._length = DraftLength()

    def prepare(self) -> None:
        for compile_graph in self.graphs():
            compile_graph()

    def graphs(self) -> list[Callable[[], None]]:
        """The graphs that it needs: functions that compile one each."""
        return list(self._decoding.graphs(range(1, self._decoding.chunk + 1)))

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self._rows[row] = _Row(list(tokens))

    def add(self, row: int, tokens: Sequence[int]) -> None:
        if state := self._rows.get(row):
            pairs = zip(state.ahead, tokens[:-1], strict=False)  # the last one is read for the logits after it
            state.num_read += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            state.text += tokens
            self._rewind(row, state)

    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        known = [row for row in counts if row in self._rows]
        most = self._length.best(len(known), max((counts[row] for row in known), default=0))
        if not most:
            return {}
        for row in known:
            self._rewind(row, self._rows[row])
        drafts: dict[int, list[int]] = {row: [] for row in known}
        unread = {row: self._rows[row].text[self._rows[row].num_read :] for row in known}
        is_timed, num_steps = all(len(tokens) <= CATCH_UP for tokens in unread.values()), 0
        begin = time.perf_counter()
        while unread:
            num_steps += 1
            for row, token in self._step(unread).items():
                drafts[row].append(token)
                if len(drafts[row]) < min(most, counts[row]):
                    unread[row] = [token]
            unread = {row: tokens for row, tokens in unread.items() if len(tokens) <= CATCH_UP}
        if is_timed:
            self._length.drafted(len(known), num_steps, time.perf_counter() - begin)
        return {row: draft for row, draft in drafts.items() if draft}

    def end(self, row: int) -> None:
        if self._rows.pop(row, None):
            self._decoding.trim(row, 0)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        self._length.stepped(num_tokens, seconds)

    def verified(self, num_drafted: int, num_right: int) -> None:
        self._length.verified(num_drafted, num_right)

    def _rewind(self, row: int, state: _Row) -> None:
        """Drop what the model has read beyond the text; the last token of the text is always read anew."""
        state.num_read, state.ahead = min(state.num_read, len(state.text) - 1), []
        self._decoding.trim(row, state.num_read)

    def _step(self, unread: dict[int, list[int]]) -> dict[int, int]:
        """Run a step of the model, which takes from `unread` what it reads: a part of the prompts, and in all other rows a
        token, or two where it has room. Returns the most likely tokens after the rows in which nothing is left."""
        reading = {row: tokens for row, tokens in unread.items() if len(tokens) > CATCH_UP}
        decoded = {row: tokens[0] for row, tokens in unread.items() if row not in reading}
        chunks = self._decoding.next_chunks(reading, len(decoded)) if reading else {}
        more = {row: unread[row][1:] for row in decoded if len(unread[row]) > 1}
        behind = self._decoding.cut_drafts(chunks, decoded, more) if more and not chunks else {}
        logits = self._decoding.step(chunks, decoded, drafts=behind)
        assert logits is not None
        found = {}
        for row, fed in {**chunks, **{row: [token, *behind.get(row, ())] for row, token in decoded.items()}}.items():
            self._has_read(row, fed)
            unread[row] = unread[row][len(fed) :]
            if not unread[row]:
                del unread[row]
                last = logits[row][-1] if row in behind else logits[row]
                token = int(np.argmax(last))
                if np.isfinite(last[token]):
                    found[row] = token
                else:
                    self._give_up(row)
        return found

    def _has_read(self, row: int, tokens: Sequence[int]) -> None:
        state = self._rows[row]
        if state.num_read < len(state.text):
            state.num_read += len(tokens)
        else:
            state.ahead += tokens

    def _give_up(self, row: int) -> None:
        """Leave a text alone that makes the model's numbers NaN or infinite; the row is overwritten for the next one."""
        del self._rows[row]
        self._decoding.clear(row)


class SharedDrafter(Drafter):
    """The drafts of one rank, on all ranks.

    Args:
        own: the drafter, on the rank that chooses tokens, the last stage's first; None on the others.
        most: tokens of a draft, at most.
    """

    is_costly = True

    def __init__(self, engine: Engine, own: ModelDrafter | None, num_rows: int, most: int):
        self._engine, self._own, self._shape = engine, own, (num_rows, most)
        self.cache_bytes = own.cache_bytes if own else 0

    def prepare(self) -> None:
        """Compile a graph at a time: ranks that wait for too long give up, and they wait for each."""
        graphs = self._own.graphs() if self._own else []
        for number in range(self._engine.max_over_ranks(len(graphs))):
            if graphs:
                graphs[number]()
            self._engine.barrier()

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        if self._own:
            self._own.begin(row, tokens)

    def add(self, row: int, tokens: Sequence[int]) -> None:
        if self._own:
            self._own.add(row, tokens)

    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        told = np.full(self._shape, NOTHING, np.int32)
        for row, draft in (self._own.propose(counts) if self._own else {}).items():
            told[row, : len(draft)] = draft
        told = self._engine.broadcast(told, self._engine.strategy.mesh.first_rank_of_last_stage)
        drafts = {row: told[row][told[row] != NOTHING].tolist() for row in counts}
        return {row: draft for row, draft in drafts.items() if draft}

    def end(self, row: int) -> None:
        if self._own:
            self._own.end(row)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        if self._own:
            self._own.stepped(num_tokens, seconds)

    def verified(self, num_drafted: int, num_right: int) -> None:
        if self._own:
            self._own.verified(num_drafted, num_right)


def open_speculation(
    flags: SpeculationFlags, draft: DraftModel | None, engine: Engine, decoding: CacheDecoder
) -> Speculation | None:
    """Open what the flags say.

    Args:
        draft: with --speculate model.
        decoding: of the model that drafts are for.

    Raises:
        ConfigError: the draft model's weights cannot be read.
    """
    if not flags.num_drafts:
        return None
    if flags.has_mtp:
        return Speculation(MTPDrafter(decoding, flags.num_drafts), flags.num_drafts)
    if draft is None:
        return Speculation(NgramDrafter(), flags.num_drafts)
    shape = decoding.num_rows, decoding.slot_table.num_slots
    own = _open_model(draft, engine.alone(), shape) if engine.is_log_rank else None
    engine.barrier()  # the others wait for the weights alone, not for the graphs as well
    return Speculation(SharedDrafter(engine, own, shape[0], flags.num_drafts), flags.num_drafts)


def _open_model(draft: DraftModel, engine: Engine, shape: tuple[int, int]) -> ModelDrafter:
    net = load_model(draft.folder, draft.family, draft.model, engine.strategy, shape, draft.weights)
    decoding = cached(engine, net, draft.model, *shape, num_drafts=CATCH_UP - 1)
    weights = sum(parameter.nbytes for parameter in net.get_parameters() if CACHE not in parameter.name)
    milestone(
        f"draft model {draft.folder}: {weights / 2**20:.1f} MiB of weights, cache {decoding.cache_bytes / 2**20:.1f} MiB"
    )
    return ModelDrafter(decoding)
