# SPDX-License-Identifier: Apache-2.0
"""Matrix products of latent attention, sparse attention, residual streams and multi-token prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import layer_shapes, parameter_shapes

ONE_PRODUCT_A_CHANNEL = "_conv.weight"
"""End of the names of convolutions, whose channels are multiplied one by one."""


@dataclass(frozen=True)
class Products:
    """Multiplications of a token, all layers together unless it says otherwise."""

    features: int
    """Features of a layer's scores and context, of all heads."""
    sinks: int = 0
    """Number of keys and values in front of each sequence."""
    sink_entries: int = 0
    """Entries of the matrix that these pass in each layer."""
    vectors: int = 0
    """Entries of a layer's norms and convolutions, which are in the planner's matrices of attention but in no product."""
    streams: int = 0
    """Gates and mixing of residual streams."""
    indexer_entries: int = 0
    """Matrices of sparse attention, which are not trained."""
    indexer_features: int = 0
    """Features of its scores, of all heads."""
    mtp: int = 0
    """Matrices of multi-token prediction: of its layers, and the head once for each."""

    def attention(self, seq_len: int) -> float:
        """Scores and context of a layer, and what its sinks need of a sequence."""
        return self.features * (seq_len + self.sinks) + self.sink_entries * self.sinks / seq_len

    def indexer(self, seq_len: int) -> float:
        return self.indexer_entries + self.indexer_features * seq_len


def products_of(config: ModelConfig, seq_len: int) -> Products | None:
    """Products that the planner's dimensions do not say; None: there are none."""
    if config.latent is None:
        features = 2 * config.num_heads * config.head_size
        return Products(features=features, mtp=_mtp(config)) if config.num_mtp_layers else None
    latent, attention = config.latent, _attention(config)
    matrices = sum(math.prod(shape) for name, shape in attention.items() if _is_matrix(name, shape))
    entries, features = _indexer(config, seq_len)
    return Products(
        features=config.num_heads * (latent.head_size + latent.value_dim),
        sinks=latent.num_sinks,
        sink_entries=latent.kv_width * config.num_heads * latent.key_value_size,
        vectors=sum(map(math.prod, attention.values())) - matrices,
        streams=_streams(config),
        indexer_entries=entries,
        indexer_features=features,
        mtp=_mtp(config),
    )


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's parameters of attention, without sparse attention."""
    shapes = layer_shapes(config, 0).items()
    return {n: shape for n, shape in shapes if n.startswith("attention.") and ".indexer." not in n}


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    is_sink = ".sink_" in name
    return len(shape) > 1 and not is_sink and not name.endswith(ONE_PRODUCT_A_CHANNEL)


def _streams(config: ModelConfig) -> int:
    if config.streams is None:
        return 0
    streams, width = config.streams.num_streams, config.streams.num_streams * config.hidden_size
    of_part = width * streams * (streams + 2) + streams * width
    return 2 * config.num_layers * of_part + width * streams


def _indexer(config: ModelConfig, seq_len: int) -> tuple[int, int]:
    """Entries and features; nothing is computed where every token is chosen."""
    indexer = config.indexer
    if indexer is None or seq_len <= indexer.top_k:
        return 0, 0
    shapes = parameter_shapes(config).items()
    entries = sum(math.prod(s) for name, s in shapes if ".indexer." in name and _is_matrix(name, s))
    layers = sum(map(config.has_indexer, range(config.num_layers)))
    return entries, layers * indexer.num_heads * indexer.head_dim


def _mtp(config: ModelConfig) -> int:
    """Matrices of the layers, of their experts those that a token passes, and the heads."""
    matrices = {
        name: math.prod(shape)
        for name, shape in parameter_shapes(config).items()
        if name.startswith("mtp.") and _is_matrix(name, shape)
    }
    total = sum(matrices.values()) + config.num_mtp_layers * config.vocab_size * config.hidden_size
    if config.experts:
        of_experts = sum(entries for name, entries in matrices.items() if ".experts." in name)
        total -= (
            of_experts * (config.experts.num_experts - config.experts.experts_per_token) // config.experts.num_experts
        )
    return total
