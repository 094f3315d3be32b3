# SPDX-License-Identifier: Apache-2.0
"""Matrix products of latent attention, sparse attention, residual streams and multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import attention_specs, mtp_specs
from sporeloom.models.parts import attention, indexer, streams
from sporeloom.models.parts.experts import STACKED
from sporeloom.models.parts.spec import num_entries


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
    latent, mtp = config.latent, _mtp(config)
    if latent is None:
        return Products(features=attention.score_features(config), mtp=mtp) if config.num_mtp_layers else None
    specs = attention_specs(config)
    entries, features = _indexer(config, seq_len)
    return Products(
        features=latent.score_features(config.num_heads),
        sinks=latent.num_sinks,
        sink_entries=latent.sink_entries(config.num_heads),
        vectors=num_entries(specs) - num_entries(specs, "matrix"),
        streams=_streams(config),
        indexer_entries=entries,
        indexer_features=features,
        mtp=mtp,
    )


def _streams(config: ModelConfig) -> int:
    if config.streams is None:
        return 0
    layers = range(config.num_layers)
    gates = num_entries((spec for layer in layers for spec in streams.parameters(config, layer)), "matrix")
    mixing = 2 * config.num_layers * config.streams.mixing(config.hidden_size)
    return gates + mixing + num_entries(streams.output_parameters(config), "matrix")


def _indexer(config: ModelConfig, seq_len: int) -> tuple[int, int]:
    """Entries and features; nothing is computed where every token is chosen."""
    if config.indexer is None or seq_len <= config.indexer.top_k:
        return 0, 0
    layers = range(config.num_layers)
    entries = num_entries((spec for layer in layers for spec in indexer.parameters(config, layer)), "matrix")
    return entries, sum(map(config.has_indexer, layers)) * config.indexer.score_features


def _mtp(config: ModelConfig) -> int:
    """Matrices of the layers, of their experts those that a token passes, and the heads."""
    specs = [*mtp_specs(config)]
    total = num_entries(specs, "matrix") + config.num_mtp_layers * config.vocab_size * config.hidden_size
    if config.experts:
        of_experts = num_entries((spec for spec in specs if STACKED in spec.name), "matrix")
        unused = config.experts.num_experts - config.experts.experts_per_token
        total -= of_experts * unused // config.experts.num_experts
    return total
