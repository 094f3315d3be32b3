# SPDX-License-Identifier: Apache-2.0
"""Next-token logits of texts that grow: with a KV cache, or recomputed from all tokens each time.

Shapes are padded to a few lengths (buckets), each compiled once, so that a new prompt compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from mindloom.inference.cache import CacheFullError, SlotTable, cache_bytes
from mindloom.models.config import ModelConfig
from mindloom.runtime.engine import Engine

MIN_BUCKET = 16
PREFILL_CHUNK = 256
"""Tokens of a prompt that are worked through at once."""

Logits = NDArray[np.float32]


class Decoding(Protocol):
    """Rows of tokens that grow."""

    num_rows: int
    cache_bytes: int

    def prepare(self, prompt_lengths: Iterable[int], max_new_tokens: int) -> None:
        """Compile what prompts of these lengths need, where no one did before."""

    def extend(self, feed: Mapping[int, Sequence[int]]) -> Logits | None:
        """Add tokens to some rows. Returns (rows, V), the logits after each fed row's last token; None on the ranks of
        a pipeline that do not hold them."""

    def reset(self, row: int) -> None:
        """Make a row empty."""


def bucket(length: int, largest: int) -> int:
    """The compiled length that takes `length` tokens: 1, or a power of two from 16 on, at most `largest`."""
    return 1 if length == 1 else min(largest, max(MIN_BUCKET, 1 << (length - 1).bit_length()))


class _Rows:
    """What both ways share: the network, and which row's logits this process holds."""

    def __init__(self, engine: Engine, net: nn.Cell, config: ModelConfig, num_rows: int):
        assert num_rows % engine.strategy.mesh.dp == 0, (num_rows, engine.strategy.mesh)
        self.engine, self.net, self.config, self.num_rows = engine, net, config, num_rows
        self._prepared: set[int] = set()

    def compile(self, length: int, *more: NDArray[Any]) -> None:
        """Compile the shapes of `length` columns, once."""
        if length not in self._prepared:
            self._prepared.add(length)
            columns = np.zeros((self.num_rows, length), np.int64)
            self.engine.prepare(self.net, *self.inputs(columns, columns, columns[:, 0], *more))

    def inputs(
        self, tokens: NDArray[Any], positions: NDArray[Any], last: NDArray[Any], *more: NDArray[Any]
    ) -> list[Tensor]:
        """Tokens (B, T), positions (B, T), in which column each row's last token is, (B,), and what else there is."""
        rows = np.arange(self.num_rows) % (self.num_rows // self.engine.strategy.mesh.dp)  # counted in a replica
        picked = rows * tokens.shape[1] + last
        return [Tensor(array.astype(np.int32)) for array in (tokens, positions, picked, *more)]

    def run(self, inputs: Sequence[Tensor]) -> Logits | None:
        logits = self.engine.run(self.net, *inputs)
        return logits.asnumpy() if self.engine.in_last_stage else None


class Cached(_Rows):
    """With a KV cache: each token is worked through once."""

    def __init__(self, engine: Engine, net: nn.Cell, config: ModelConfig, num_rows: int, num_slots: int):
        """`net`: the model with caches attached for `num_rows` rows of `num_slots`."""
        super().__init__(engine, net, config, num_rows)
        self.slot_table = SlotTable(num_rows, config.kv_heads, num_slots, engine.strategy.mesh)
        self.cache_bytes = cache_bytes(config, num_rows, num_slots)

    def prepare(self, prompt_lengths: Iterable[int], max_new_tokens: int) -> None:
        prefills = {part for length in prompt_lengths for part in _chunks(length)}
        for length in sorted({bucket(part, PREFILL_CHUNK) for part in (*prefills, 1)}):
            self.compile(length, self.slot_table.indices(np.zeros((self.num_rows, length), np.int64)))

    def extend(self, feed: Mapping[int, Sequence[int]]) -> Logits | None:
        for row, ids in feed.items():
            if self.slot_table.lengths[row] + len(ids) > self.slot_table.capacity:
                raise CacheFullError(
                    f"row {row} holds {self.slot_table.lengths[row]} tokens, no room for {len(ids)} more"
                )
        result = np.zeros((self.num_rows, self.config.vocab_size), np.float32)
        start, longest = 0, max(map(len, feed.values()))
        while start < longest:
            count = min(PREFILL_CHUNK, longest - start)
            parts = {row: ids[start : start + count] for row, ids in feed.items() if len(ids) > start}
            logits = self.step(parts, bucket(count, PREFILL_CHUNK))
            ended = [row for row in parts if len(feed[row]) <= start + count]
            if logits is not None:
                result[ended] = logits[ended]
            start += count
        return result if self.engine.in_last_stage else None

    def step(self, parts: Mapping[int, Sequence[int]], length: int) -> Logits | None:
        """Work through up to `length` tokens of each given row; the other rows, and what is too long, fill the shape."""
        tokens, positions = np.zeros((2, self.num_rows, length), np.int64)
        slots = np.full((self.num_rows, length), self.slot_table.num_slots - 1)
        last = np.zeros(self.num_rows, np.int64)
        for row, ids in parts.items():
            taken = self.slot_table.append(row, len(ids))
            tokens[row, : len(ids)], positions[row, : len(ids)], slots[row, : len(ids)] = ids, taken, taken
            last[row] = len(ids) - 1
        return self.run(self.inputs(tokens, positions, last, self.slot_table.indices(slots)))

    def trim(self, row: int, length: int) -> None:
        """Forget what a row holds beyond `length` tokens."""
        self.slot_table.trim(row, length)

    def reset(self, row: int) -> None:
        self.slot_table.reset(row)


class Uncached(_Rows):
    """Without a cache: every step works through all tokens again. For comparison, and for texts of one step."""

    cache_bytes = 0

    def __init__(self, engine: Engine, net: nn.Cell, config: ModelConfig, num_rows: int):
        super().__init__(engine, net, config, num_rows)
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]

    def prepare(self, prompt_lengths: Iterable[int], max_new_tokens: int) -> None:
        grown = {length + more for length in prompt_lengths for more in range(max_new_tokens)}
        for length in sorted({bucket(n, self.config.seq_len) for n in grown}):
            self.compile(length)

    def extend(self, feed: Mapping[int, Sequence[int]]) -> Logits | None:
        for row, ids in feed.items():
            if len(self.tokens[row]) + len(ids) > self.config.seq_len:
                raise CacheFullError(f"row {row} holds {len(self.tokens[row])} tokens, no room for {len(ids)} more")
            self.tokens[row] += ids
        length = bucket(max(len(self.tokens[row]) for row in feed), self.config.seq_len)
        tokens, last = np.zeros((self.num_rows, length), np.int64), np.zeros(self.num_rows, np.int64)
        for row in feed:
            tokens[row, : len(self.tokens[row])] = self.tokens[row]
            last[row] = len(self.tokens[row]) - 1
        positions = np.broadcast_to(np.arange(length), tokens.shape)
        return self.run(self.inputs(tokens, positions, last))

    def reset(self, row: int) -> None:
        self.tokens[row] = []


def _chunks(length: int) -> Iterable[int]:
    """How many tokens each step of a prefill takes."""
    return [min(PREFILL_CHUNK, length - start) for start in range(0, length, PREFILL_CHUNK)]
