# SPDX-License-Identifier: Apache-2.0
"""Next-token logits of growing texts without a KV cache: recomputed from all tokens each time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.inference.cache import CacheFullError
from sporeloom.inference.decoding import NO_DRAFTS, Logits, Rows, as_tensors, bucket
from sporeloom.models.config import ModelConfig
from sporeloom.runtime.engine import Engine


class UncachedDecoder(Rows):
    """Decoding without a cache: every step computes all tokens again. For comparison, and for texts of one step."""

    cache_bytes = 0
    reusable = 0

    def __init__(self, engine: Engine, net: nn.Cell, config: ModelConfig, num_rows: int):
        super().__init__(engine, net, config, num_rows)
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]

    def prepare(self, prompt_lengths: Iterable[int], max_new_tokens: int) -> None:
        grown = {length + more for length in prompt_lengths for more in range(max_new_tokens)}
        for length in sorted({bucket(n, self.config.seq_len) for n in grown}):
            self.compile(as_tensors(self.inputs(self.tokens, [0] * self.num_rows, length, False)))

    def next_chunks(self, waiting: Mapping[int, Sequence[int]], num_decoded: int) -> dict[int, Sequence[int]]:
        del num_decoded
        return dict(waiting)

    def cut_drafts(
        self, chunks: Mapping[int, Sequence[int]], rows: Collection[int], drafts: Mapping[int, Sequence[int]]
    ) -> dict[int, Sequence[int]]:
        return {}  # a longer text is computed in another shape

    def step(
        self,
        chunks: Mapping[int, Sequence[int]],
        tokens: Mapping[int, int],
        every: bool = False,
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
    ) -> dict[int, Logits] | None:
        assert not drafts, drafts
        added = {**chunks, **{row: [token] for row, token in tokens.items()}}
        for row, ids in added.items():
            if len(self.tokens[row]) + len(ids) > self.config.seq_len:
                raise CacheFullError(f"row {row} holds {len(self.tokens[row])} tokens, no room for {len(ids)} more")
            self.tokens[row] += ids
        length = bucket(max(len(self.tokens[row]) for row in added), self.config.seq_len)
        feed = {row: self.tokens[row] for row in added}
        given = [feed.get(row, []) for row in range(self.num_rows)]
        logits = self.run(range(self.num_rows), feed, self.inputs(given, [0] * self.num_rows, length, every))
        if logits is None or not every:
            return logits
        return {row: logits[row][-len(chunks[row]) :] if row in chunks else logits[row][-1] for row in logits}

    def states(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Logits] | None:
        raise ConfigError("embeddings need a KV cache; decode with one")

    def trim(self, row: int, length: int) -> None:
        del self.tokens[row][length:]

    def clear(self, row: int, length: int = 0) -> None:
        self.trim(row, length)

    def use_adapter(self, row: int, adapter: int) -> None:
        assert adapter == 0, adapter
