# SPDX-License-Identifier: Apache-2.0
"""The slot table of a KV cache: which slots each row has filled. The model holds the keys and values
(nn/cache.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom.models.config import ModelConfig
from sporeloom.strategy.mesh import Mesh


class CacheFullError(RuntimeError):
    """A row has fewer free slots than tokens to store."""


@dataclass
class SlotTable:
    """Rows of slots, token i of a row in slot i. The last slot is spare: tokens that only pad a shape go there."""

    num_rows: int
    num_kv_heads: int
    num_slots: int
    mesh: Mesh
    lengths: NDArray[np.int64] = field(init=False)
    """Number of tokens in each row."""

    def __post_init__(self) -> None:
        self.lengths = np.zeros(self.num_rows, np.int64)

    @property
    def capacity(self) -> int:
        """Maximum number of tokens in a row."""
        return self.num_slots - 1

    def append(self, row: int, count: int) -> NDArray[np.int64]:
        """Take the next `count` slots of a row.

        Raises:
            CacheFullError: there are not so many left.
        """
        start = int(self.lengths[row])
        if start + count > self.capacity:
            raise CacheFullError(f"row {row} holds {start} tokens, capacity {self.capacity}: {count} more do not fit")
        self.lengths[row] += count
        return np.arange(start, start + count)

    def trim(self, row: int, length: int) -> None:
        """Drop the tokens of a row beyond `length`."""
        assert 0 <= length <= self.lengths[row], (length, self.lengths[row])
        self.lengths[row] = length

    def indices(self, rows: Sequence[int], slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Slots (B, T) of B rows -> (B, KV, T, 3): row, head and slot, the first two counted within a device's part of the
        mesh."""
        in_replica = np.asarray(rows) % (self.num_rows // self.mesh.dp)
        heads = np.arange(self.num_kv_heads) % (self.num_kv_heads // math.gcd(self.num_kv_heads, self.mesh.tp))
        parts = np.broadcast_arrays(in_replica[:, None, None], heads[:, None], slots[:, None, :])
        return np.stack(parts, -1).astype(np.int32)


CacheName = Literal["auto", "int8"]
KV_CACHE_HELP = (
    "number type of the KV cache; int8: a quarter of float32's memory, with a scale for each token and head; auto: the type "
    "that the model computes in"
)
"""Help of the flag --kv-cache."""


def cache_problems(name: CacheName, config: ModelConfig) -> list[str]:
    """List the reasons why a model's cache cannot have a number type."""
    if name == "auto" or not config.latent:
        return []
    return ["--kv-cache int8 is for attention with keys and values of heads; this model caches latents: leave it out"]


def cache_bytes(
    config: ModelConfig, num_rows: int, num_slots: int, name: CacheName = "auto", num_drafts: int = 0
) -> int:
    """Bytes of the keys and values of all layers, on all devices together, those of multi-token prediction and the states
    that these read among them; and of what convolutions and sparse attention keep.

    Args:
        name: the number type of --kv-cache.
        num_drafts: maximum number of drafted tokens of a row.
    """
    itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}[config.compute_dtype]
    num_layers, states = config.num_layers + config.num_mtp_layers, config.num_mtp_layers * config.hidden_size
    if name == "int8":
        in_layers = num_layers * (sum(config.cache_widths) + 2 * 4 * config.kv_heads)
        return num_rows * num_slots * (in_layers + states * itemsize)
    entries = num_slots * (num_layers * sum(config.cache_widths) + states)
    if config.indexer:
        entries += len(config.indexer.layers) * num_slots * config.indexer.head_dim
    if config.latent and config.latent.conv_width:
        latent = config.latent
        channels = (latent.query_width or 0) + latent.kv_width + config.num_heads * latent.value_dim
        entries += num_layers * (latent.conv_width + num_drafts + 1) * channels
    return num_rows * entries * itemsize
