# SPDX-License-Identifier: Apache-2.0
"""Next-token logits of growing texts, with a KV cache.

Shapes are padded to a few lengths (buckets), each compiled once, so that a new prompt compiles nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from sporeloom.inference.cache import SlotTable, cache_bytes
from sporeloom.inference.pooling import Pooling
from sporeloom.inference.slot_memory import SlotMemory
from sporeloom.inference.speculation import cut
from sporeloom.models.config import ModelConfig
from sporeloom.nn.decoder import HiddenStates
from sporeloom.runtime.engine import Engine

MIN_BUCKET = 16
PREFILL_CHUNK = 128
"""Maximum number of prompt tokens that are prefilled at once."""

Logits = NDArray[np.float32]
NO_DRAFTS: Mapping[int, Sequence[int]] = {}


class Decoding(Protocol):
    """Rows of tokens that grow."""

    num_rows: int
    cache_bytes: int
    has_kernels: bool
    """Whether compiled kernels decode, not MindSpore's operators (`sporeloom.inference.kernels`)."""
    reusable: int
    """Prefix caching: another prompt may reuse the first tokens of a row, in multiples of this number. 0: none; 1:
    any number, also of generated tokens."""

    def prepare(self, prompt_lengths: Iterable[int], max_new_tokens: int) -> None:
        """Compile for prompts of these lengths, unless that is done."""

    def next_chunks(self, waiting: Mapping[int, Sequence[int]], num_decoded: int) -> dict[int, Sequence[int]]:
        """Choose from the rows and the rest of their prompts, the oldest first, what one `step` takes; always some
        of the oldest. `num_decoded`: number of rows that get a token in the step, and wait for it.

        What a prompt gets does not depend on who else is there.
        """

    def cut_drafts(
        self, chunks: Mapping[int, Sequence[int]], rows: Collection[int], drafts: Mapping[int, Sequence[int]]
    ) -> dict[int, Sequence[int]]:
        """Shorten drafts, of some of the rows that get a token, to what the step has room for."""

    def step(
        self,
        chunks: Mapping[int, Sequence[int]],
        tokens: Mapping[int, int],
        every: bool = False,
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
    ) -> dict[int, Logits] | None:
        """Add parts of prompts to some rows, and to others the token that was chosen for each, with drafts of what follows.
        Returns logits (V,) after the last token of each row, with `every` (T, V) after each token of the prompts, and (T, V)
        after each token of a row with a draft; None on the ranks of a pipeline that do not hold them."""

    def states(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Logits] | None:
        """Add parts of prompts to some rows, as `step` does. Returns the inputs of the head that embeddings are made of,
        (T, D) of each row; None on the ranks of a pipeline that do not hold them."""

    def trim(self, row: int, length: int) -> None:
        """Drop the tokens of a row beyond `length`."""

    def clear(self, row: int, length: int = 0) -> None:
        """Drop the tokens of a row beyond `length` and overwrite them: a mask hides finite numbers, but not NaN. Every rank
        calls it."""

    def use_adapter(self, row: int, adapter: int) -> None:
        """Set the adapter of a row's further tokens, counted from 1; 0: none."""


def bucket(length: int, largest: int) -> int:
    """The compiled length for `length` tokens: a power of two from 16 on, at most `largest`."""
    return min(largest, max(MIN_BUCKET, 1 << (length - 1).bit_length()))


class Rows:
    """Base of all decoders: the network, and the rows whose logits this process holds."""

    def __init__(self, engine: Engine, net: nn.Cell, config: ModelConfig, num_rows: int):
        assert num_rows % engine.strategy.mesh.dp == 0, (num_rows, engine.strategy.mesh)
        self.engine, self.net, self.config, self.num_rows = engine, net, config, num_rows
        self.num_replicas = engine.strategy.mesh.dp
        self.has_kernels = bool(net.num_kernels)
        self._prepared: set[tuple[int, ...]] = set()

    def compile(self, inputs: Sequence[Tensor], net: nn.Cell | None = None) -> None:
        """Compile once for the shapes of these inputs; `net`: another network than that of logits."""
        shapes = (net is None, *(length for tensor in inputs for length in tensor.shape))
        if shapes not in self._prepared:
            self._prepared.add(shapes)
            self.engine.prepare(net or self.net, *inputs)

    def inputs(
        self, feed: Sequence[Sequence[int]], starts: Sequence[int], length: int, every: bool
    ) -> tuple[NDArray[Any], ...]:
        """Tokens (B, T) and positions (B, T) of texts that continue at `starts`, and whose logits are needed: (B,)
        or (B*T,), counted in a replica."""
        tokens, positions = np.zeros((2, len(feed), length), np.int64)
        in_replica = np.arange(len(feed)) % (len(feed) // self.num_replicas)
        for place, (ids, start) in enumerate(zip(feed, starts, strict=True)):
            tokens[place, : len(ids)] = ids
            positions[place, : len(ids)] = np.arange(start, start + len(ids))
        columns = np.arange(length) if every else np.asarray([[max(len(ids), 1) - 1] for ids in feed])
        return tokens, positions, (in_replica[:, None] * length + columns).reshape(-1)

    def run(
        self,
        rows: Sequence[int],
        feed: Mapping[int, Sequence[int]],
        inputs: Sequence[NDArray[Any]],
        net: nn.Cell | None = None,
    ) -> dict[int, Logits] | None:
        """Logits of the rows of `feed` among those of the inputs; or what another network returns in their place."""
        output = self.engine.run(net or self.net, *as_tensors(inputs))
        if not self.engine.in_last_stage:
            return None
        logits = output.asnumpy()
        if len(logits) == len(rows):
            return {row: logits[place] for place, row in enumerate(rows) if row in feed}
        logits = logits.reshape(len(rows), -1, logits.shape[-1])
        return {row: logits[place, : len(feed[row])] for place, row in enumerate(rows) if row in feed}


def as_tensors(arrays: Iterable[NDArray[Any]]) -> list[Tensor]:
    return [Tensor(array.astype(np.int32)) for array in arrays]


class CacheDecoder(Rows):
    """Rows of a KV cache.

    Args:
        net: the model with caches attached for `num_rows` rows of `num_slots`.
        chunk: tokens of a prompt that are prefilled at once, between two tokens of the others.
        pooling: of embeddings; None: it gives none.
    """

    def __init__(
        self,
        engine: Engine,
        net: nn.Cell,
        config: ModelConfig,
        num_rows: int,
        num_slots: int,
        chunk: int = PREFILL_CHUNK,
        pooling: Pooling | None = None,
    ):
        super().__init__(engine, net, config, num_rows)
        self.slot_table = SlotTable(num_rows, config.kv_heads, num_slots, engine.strategy.mesh)
        held = config if net.drafts else config.without_mtp()
        self.cache_bytes = cache_bytes(held, num_rows, num_slots, net.kv_cache, net.num_drafts)
        self.chunk = min(chunk, config.seq_len)
        self._memory = SlotMemory(engine, net)
        self.hidden = HiddenStates(net).set_train(False) if pooling else None
        self.pools_every = pooling == "mean"
        """Whether embeddings are made of the states of all tokens, not of the last one."""

    def trim(self, row: int, length: int) -> None:
        self.slot_table.trim(row, length)

    def clear(self, row: int, length: int = 0) -> None:
        self.trim(row, length)
        self._memory.clear(row, length)

    def read_slots(self, row: int, start: int, stop: int) -> list[NDArray[Any]]:
        """Copy this rank's part of what a row's tokens left in the caches."""
        return self._memory.read(row, start, stop)

    def restore(self, row: int, start: int, count: int, blocks: Sequence[Sequence[NDArray[Any]]]) -> None:
        """Replace the tokens of a row from `start` on by blocks of `count` each, which `read_slots` returned."""
        self.trim(row, start)
        for block in blocks:
            self._memory.write(row, int(self.slot_table.append(row, count)[0]), block)

    def prepare(self, prompt_lengths: Iterable[int], max_new_tokens: int) -> None:
        del max_new_tokens
        for compile_graph in self.graphs(prompt_lengths):
            compile_graph()

    @abstractmethod
    def graphs(self, prompt_lengths: Iterable[int]) -> Iterator[Callable[[], None]]:
        """The graphs that prompts of these lengths need: functions that compile one each."""


class CachedDecoder(CacheDecoder):
    """Decoding with a KV cache: each token is computed once.

    Prompts and chosen tokens are computed apart: a part of a prompt of one row of each replica, and a token of all rows. So
    the shapes are the same whatever else is running: the logits of a prompt depend on no other, to the bit.

    A draft is computed in the places of rows that get no token in a step, where the network lends them: in the same shape.
    Where a product gives another bit to another place in the batch, tokens are computed one after another in the first place.
    """

    def __init__(self, *of: Any, **more: Any):
        super().__init__(*of, **more)
        self.reusable = 0 if self.config.has_convolutions else self.chunk  # whose states are those of the last tokens
        self.in_replica = self.num_rows // self.num_replicas
        self.adapters: NDArray[np.int64] | None = None
        if self.net.has_several_adapters:
            self.adapters = np.zeros(self.num_rows, np.int64)

    def graphs(self, prompt_lengths: Iterable[int]) -> Iterator[Callable[[], None]]:
        ends = {min(self.chunk, length - start) for length in prompt_lengths for start in range(0, length, self.chunk)}
        for length in sorted({bucket(length, self.chunk) for length in ends}):
            yield partial(self._compile_prefill, length)
        yield self._compile_decode

    def shapes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The graphs that may be needed: a name, and the function that compiles it."""
        yield "a token of each row", self._compile_decode
        length = min(MIN_BUCKET, self.chunk)
        lengths = [length]
        while lengths[-1] < self.chunk:
            lengths.append(min(2 * lengths[-1], self.chunk))
        for every in (False, True):
            for length in lengths:
                what = f"{length} tokens of a prompt{', scored' if every else ''}"
                yield what, partial(self._compile_prefill, length, every)
        for length in lengths if self.hidden else ():
            yield (
                f"{length} tokens of a text to embed",
                partial(self._compile_prefill, length, self.pools_every, self.hidden),
            )

    def _compile_prefill(self, length: int, every: bool = False, net: nn.Cell | None = None) -> None:
        rows = range(0, self.num_rows, self.in_replica)
        self.compile(as_tensors(self._inputs(rows, {}, length, every)), net)

    def _compile_decode(self) -> None:
        rows = range(0, self.num_rows, 1 if self.net.places_are_alike else self.in_replica)
        self.compile(as_tensors(self._inputs(rows, {}, 1, False)))

    def next_chunks(self, waiting: Mapping[int, Sequence[int]], num_decoded: int) -> dict[int, Sequence[int]]:
        del num_decoded  # the logits of a prompt would depend on it
        chunks: dict[int, Sequence[int]] = {}
        for row, ids in waiting.items():
            part = ids[: self.chunk]
            fits = not chunks or self._bucket(part) == self._bucket(next(iter(chunks.values())))
            if fits and row // self.in_replica not in {other // self.in_replica for other in chunks}:
                chunks[row] = part
        return chunks

    def _bucket(self, ids: Sequence[int]) -> int:
        return bucket(len(ids), self.chunk)

    def step(
        self,
        chunks: Mapping[int, Sequence[int]],
        tokens: Mapping[int, int],
        every: bool = False,
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
    ) -> dict[int, Logits] | None:
        logits: dict[int, Logits] = {}
        if chunks:
            logits |= self._prefill(chunks, every) or {}
        if tokens:
            logits |= self._run_tokens(tokens, drafts) or {}
        return logits if self.engine.in_last_stage else None

    def states(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Logits] | None:
        found = self._prefill(chunks, self.pools_every, self.hidden)
        return found and {row: np.atleast_2d(of_row) for row, of_row in found.items()}

    def _prefill(
        self, chunks: Mapping[int, Sequence[int]], every: bool, net: nn.Cell | None = None
    ) -> dict[int, Logits] | None:
        mine = {row // self.in_replica: row for row in chunks}
        assert len(mine) == len(chunks), (list(chunks), self.in_replica)
        rows = [mine.get(replica, replica * self.in_replica) for replica in range(self.num_replicas)]
        inputs = self._inputs(rows, chunks, max(map(self._bucket, chunks.values())), every)
        for row, ids in chunks.items():
            self.slot_table.append(row, len(ids))
        return self.run(rows, chunks, inputs, net)

    def cut_drafts(
        self, chunks: Mapping[int, Sequence[int]], rows: Collection[int], drafts: Mapping[int, Sequence[int]]
    ) -> dict[int, Sequence[int]]:
        kept: dict[int, Sequence[int]] = {}
        for replica in range(self.num_replicas if self.net.num_drafts else 0):
            room = self.in_replica - sum(row // self.in_replica == replica for row in rows)
            kept |= cut({row: draft for row, draft in drafts.items() if row // self.in_replica == replica}, room)
        return kept

    def _run_tokens(self, tokens: Mapping[int, int], drafts: Mapping[int, Sequence[int]]) -> dict[int, Logits] | None:
        """Logits after a token of each row and the drafts behind it, of which each has a place in the batch."""
        places = {row: [row] for row in tokens}
        rows, starts = list(range(self.num_rows)), self.slot_table.lengths.tolist()
        given: list[Sequence[int]] = [[tokens[row]] if row in tokens else () for row in rows]
        idle = [place for place in rows if place not in tokens]
        for row, draft in drafts.items():
            for token in draft:
                place = next(each for each in idle if each // self.in_replica == row // self.in_replica)
                idle.remove(place)
                rows[place], given[place], starts[place] = row, [token], starts[row] + len(places[row])
                places[row].append(place)
        for row, of_row in places.items():
            self.slot_table.append(row, len(of_row))
        logits = self._run_places(rows, given, starts, places.values())
        if logits is None:
            return None
        return {row: logits[of_row] if row in drafts else logits[row] for row, of_row in places.items()}

    def _run_places(
        self,
        rows: Sequence[int],
        given: Sequence[Sequence[int]],
        starts: Sequence[int],
        texts: Iterable[Sequence[int]],
    ) -> Logits | None:
        """Logits (B, V) of all places: at once, or a place of each replica after another, those of a text in its order."""
        turns: Iterable[Sequence[int | None]] = [range(len(rows))]
        if not self.net.places_are_alike:
            queues: list[list[int]] = [[] for _ in range(self.num_replicas)]
            for places in texts:
                queues[places[0] // self.in_replica] += places
            turns = zip_longest(*queues)
        logits = np.zeros((len(rows), self.config.vocab_size), np.float32)
        for turn in turns:
            held = [number * self.in_replica if place is None else place for number, place in enumerate(turn)]
            tokens = [() if place is None else given[place] for place in turn]
            inputs = self._inputs_at(
                [rows[place] for place in held], tokens, [starts[place] for place in held], 1, False
            )
            output = self.engine.run(self.net, *as_tensors(inputs))
            if self.engine.in_last_stage:
                logits[held] = output.asnumpy()
        return logits if self.engine.in_last_stage else None

    def _inputs(
        self, rows: Sequence[int], feed: Mapping[int, Sequence[int]], length: int, every: bool
    ) -> tuple[NDArray[Any], ...]:
        given, starts = [feed.get(row, ()) for row in rows], [int(self.slot_table.lengths[row]) for row in rows]
        return self._inputs_at(rows, given, starts, length, every)

    def _inputs_at(
        self, rows: Sequence[int], given: Sequence[Sequence[int]], starts: Sequence[int], length: int, every: bool
    ) -> tuple[NDArray[Any], ...]:
        """Inputs for `length` tokens of some rows, those given from `starts` on; padding fills the shape, and its keys go to
        the spare slot."""
        tokens, positions, picked = self.inputs(given, starts, length, every)
        is_fed = np.arange(length) < np.asarray([[len(ids)] for ids in given])
        slots = np.where(is_fed, positions, self.slot_table.num_slots - 1)
        inputs = tokens, positions, picked, self.slot_table.indices(rows, slots)
        if self.adapters is None:
            return inputs
        return *inputs, np.repeat(self.adapters[np.asarray(rows)][:, None], length, axis=1)

    def use_adapter(self, row: int, adapter: int) -> None:
        if self.adapters is not None:
            self.adapters[row] = adapter
        else:
            assert adapter == 0, adapter
