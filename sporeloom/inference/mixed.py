# SPDX-License-Identifier: Apache-2.0
"""Ragged batches: parts of prompts and new tokens of all rows in one batch, where no token's numbers depend on the
others.

Source: arXiv:2308.16369 (decodes ride along with a chunk of a prompt, whose weights are read anyway).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.inference.decoding import NO_DRAFTS, PREFILL_CHUNK, CachedDecoder, CacheDecoder, Logits, as_tensors
from sporeloom.inference.pooling import Pooling
from sporeloom.inference.speculation import cut
from sporeloom.models.config import ModelConfig
from sporeloom.nn.linear import MAX_KERNEL_ROWS
from sporeloom.runtime.engine import Engine


class RaggedDecoder(CacheDecoder):
    """Decoding with a KV cache, where each token of a step is a row of the network's batch.

    Only for networks whose products are all by the compiled kernels (`rows_are_alone`): what a prompt gets then depends on no
    other, to the bit, nor on how it is cut. Tokens that only fill a shape are not computed by them.
    """

    reusable = 1

    def __init__(self, *of: Any, num_drafts: int = 0, **more: Any):
        super().__init__(*of, **more)
        num_rows = self.num_rows
        assert takes(self.net, num_rows), (num_rows, self.net)
        self.chunk = min(self.chunk, MAX_KERNEL_ROWS + 1 - num_rows)
        self.sizes = sorted(
            {size for size in (1, 4, 16) if size < num_rows}
            | {num_rows, num_rows - 1 + self.chunk, MAX_KERNEL_ROWS}
            | set(draft_sizes(num_rows, num_drafts))
        )
        """Numbers of tokens that a step is compiled for: of the rows, with a part of a prompt, of prompts alone, with
        drafts."""
        self.num_drafts = num_drafts

    def graphs(self, prompt_lengths: Iterable[int]) -> Iterator[Callable[[], None]]:
        most = max(self.num_rows, min(sum(prompt_lengths), MAX_KERNEL_ROWS))
        for size in self.sizes[: bisect_left(self.sizes, most) + 1]:
            yield partial(self._compile, size)
        most = max(draft_sizes(self.num_rows, self.num_drafts), default=1)
        for size in [size for size in self.sizes if 1 < size <= most]:
            yield partial(self._compile, size, True)

    def shapes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The graphs that may be needed: a name, and the function that compiles it."""
        for size in self.sizes:
            yield f"a step of {size} tokens", partial(self._compile, size)
        for size in self.sizes[1:]:
            yield f"a step of {size} tokens, all scored", partial(self._compile, size, True)

        for size in self.sizes_of_chunks if self.hidden else ():
            what = f"a step of {size} tokens of texts to embed"
            yield what, partial(self._compile, size, self.pools_every, self.hidden)

    @property
    def sizes_of_chunks(self) -> list[int]:
        """Numbers of tokens of steps that take parts of prompts only."""
        return sorted({min(self.num_rows - 1 + self.chunk, MAX_KERNEL_ROWS), MAX_KERNEL_ROWS})

    def _compile(self, size: int, every: bool = False, net: nn.Cell | None = None) -> None:
        self.compile(as_tensors(self._inputs({}, size, every)), net)

    def next_chunks(self, waiting: Mapping[int, Sequence[int]], num_decoded: int) -> dict[int, Sequence[int]]:
        """Prompts beyond a chunk only where more of them end in the step than rows wait for it."""
        chunks = _first_tokens(waiting, MAX_KERNEL_ROWS - num_decoded)
        num_ended = sum(len(ids) == len(waiting[row]) for row, ids in chunks.items())
        return chunks if num_ended > num_decoded or not num_decoded else _first_tokens(waiting, self.chunk)

    def cut_drafts(
        self, chunks: Mapping[int, Sequence[int]], rows: Collection[int], drafts: Mapping[int, Sequence[int]]
    ) -> dict[int, Sequence[int]]:
        most = max((size for size in self.sizes if size < MAX_KERNEL_ROWS), default=1)
        return cut(drafts, max(0, most - len(rows) - sum(map(len, chunks.values()))))

    def step(
        self,
        chunks: Mapping[int, Sequence[int]],
        tokens: Mapping[int, int],
        every: bool = False,
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
    ) -> dict[int, Logits] | None:
        feed = {**chunks, **{row: [token, *drafts.get(row, ())] for row, token in tokens.items()}}
        whole = {*(chunks if every else ()), *drafts}
        return self._run(feed, self.sizes, every or bool(drafts), whole)

    def states(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Logits] | None:
        every = self.pools_every
        found = self._run(chunks, self.sizes_of_chunks, every, set(chunks) if every else (), self.hidden)
        return {row: np.atleast_2d(of_row) for row, of_row in found.items()}

    def _run(
        self,
        feed: Mapping[int, Sequence[int]],
        sizes: Sequence[int],
        every: bool,
        whole: Collection[int],
        net: nn.Cell | None = None,
    ) -> dict[int, Logits]:
        """Run a network on the tokens of `feed`. Returns its rows after all tokens of the rows `whole`, for which `every` is
        needed, and after the last token of the others."""
        count = sum(map(len, feed.values()))
        inputs = self._inputs(feed, next(size for size in sizes if size >= count), every)
        for row, ids in feed.items():
            self.slot_table.append(row, len(ids))
        logits = self.engine.run(net or self.net, *as_tensors(inputs)).asnumpy()
        if not every:
            return dict(zip(feed, logits, strict=False))
        ends = dict(zip(feed, np.cumsum([len(ids) for ids in feed.values()]), strict=True))
        return {
            row: logits[end - len(feed[row]) : end] if row in whole else logits[end - 1] for row, end in ends.items()
        }

    def _inputs(self, feed: Mapping[int, Sequence[int]], size: int, every: bool) -> tuple[NDArray[Any], ...]:
        """Inputs for `size` tokens, those of `feed` first. The keys of the padding go to the spare slot, by which
        the kernels recognize it. The logits of all are needed, or of the last token of each row."""
        starts = {row: int(self.slot_table.lengths[row]) for row in feed}
        places = [(row, starts[row] + i, token) for row, ids in feed.items() for i, token in enumerate(ids)]
        rows, positions, tokens = np.asarray([*places, *[(0, 0, 0)] * (size - len(places))]).T
        slots = np.where(np.arange(size) < len(places), positions, self.slot_table.num_slots - 1)
        picked = np.arange(size)
        if not every:
            picked = np.zeros(min(size, self.num_rows), np.int64)
            picked[: len(feed)] = np.cumsum([len(ids) for ids in feed.values()]) - 1
        return tokens[:, None], positions[:, None], picked, self.slot_table.indices(rows, slots[:, None])

    def clear(self, row: int, length: int = 0) -> None:
        self.trim(row, length)  # the kernels read no slot that is hidden

    def use_adapter(self, row: int, adapter: int) -> None:
        assert adapter == 0, adapter


def _first_tokens(waiting: Mapping[int, Sequence[int]], room: int) -> dict[int, Sequence[int]]:
    chunks: dict[int, Sequence[int]] = {}
    for row, ids in waiting.items():
        if room:
            chunks[row] = ids[:room]
            room -= len(chunks[row])
    return chunks


def takes(net: nn.Cell, num_rows: int) -> bool:
    """Whether a network with this many rows of caches supports mixed batches."""
    return net.rows_are_alone and num_rows <= MAX_KERNEL_ROWS // 2


def draft_sizes(num_rows: int, num_drafts: int) -> list[int]:
    """Numbers of tokens of a step with drafts: powers of two, so that half of them at most are padding."""
    most = min(num_rows * (1 + num_drafts), MAX_KERNEL_ROWS)
    return [min(2**power, most) for power in range(1, (most - 1).bit_length() + 1)] if num_drafts else []


def cached(
    engine: Engine,
    net: nn.Cell,
    config: ModelConfig,
    num_rows: int,
    num_slots: int,
    chunk: int = PREFILL_CHUNK,
    num_drafts: int = 0,
    pooling: Pooling | None = None,
) -> CachedDecoder | RaggedDecoder:
    """Decoding with a KV cache, in mixed batches where the network supports them."""
    if takes(net, num_rows):
        return RaggedDecoder(engine, net, config, num_rows, num_slots, chunk, pooling, num_drafts=num_drafts)
    return CachedDecoder(engine, net, config, num_rows, num_slots, chunk, pooling)
