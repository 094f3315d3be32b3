# SPDX-License-Identifier: Apache-2.0
"""Matrix products of latent attention, sparse attention, residual streams and multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import attention_specs, mtp_specs
from sporeloom.models.parts import attention, indexer, streams
from sporeloom.models.parts.experts import STACKED
from sporeloom.models.parts.spec import num_entries
from sporeloom.models.parts.work import NO_WORK, Work
from sporeloom.planner.layer_work import LayerWork, work_of_layer, work_of_plain_layer


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
    """Matrices of sparse attention."""
    indexer_features: int = 0
    """Features of its scores, of all heads."""
    indexer_is_trained: bool = False
    mtp: int = 0
    """Matrices of multi-token prediction: of its layers, and the head once for each."""
    layer: LayerWork | None = None
    """Work of a layer with latent attention."""
    mtp_layer: LayerWork | None = None
    """Work of a layer of multi-token prediction with latent attention."""
    fused_layer: LayerWork | None = None
    """Work of a layer where a kernel computes attention."""
    fused_mtp_layer: LayerWork | None = None
    streams_out: Work = NO_WORK
    """Work behind the last layer, where residual streams become one."""

    def work(self, flash: bool, of_mtp: bool = False) -> LayerWork | None:
        """Work of a layer with latent attention, or of one of multi-token prediction; `flash`: with a kernel, if one can
        compute it."""
        fused, plain = (self.fused_mtp_layer, self.mtp_layer) if of_mtp else (self.fused_layer, self.layer)
        return (fused if flash else None) or plain

    @property
    def num_streams(self) -> int:
        """Number of residual streams between layers."""
        return self.layer.num_streams if self.layer else 1

    def attention(self, seq_len: int) -> float:
        """Scores and context of a layer, and what its sinks need of a sequence."""
        return self.features * (seq_len + self.sinks) + self.sink_entries * self.sinks / seq_len

    def chosen(self, seq_len: int) -> float:
        """FLOPs of the indexers' forward pass."""
        return 2.0 * (self.indexer_entries + self.indexer_features * seq_len)

    def indexer(self, seq_len: int) -> float:
        """FLOPs of the indexers: forward, and where they have a loss for the gradients of weights and scores."""
        further = 2.0 * (self.indexer_entries + 2 * self.indexer_features * seq_len) if self.indexer_is_trained else 0.0
        return self.chosen(seq_len) + further


def products_of(config: ModelConfig, seq_len: int) -> Products | None:
    """Products that the planner's dimensions do not say; None: there are none."""
    latent, mtp = config.latent, _mtp(config)
    if latent is None:
        return Products(features=attention.score_features(config), mtp=mtp) if config.num_mtp_layers else None
    specs = attention_specs(config)
    entries, features = _indexer(config, seq_len)
    fuses = config.flash_problem is None
    return Products(
        features=latent.score_features(config.num_heads),
        sinks=latent.num_sinks,
        sink_entries=latent.sink_entries(config.num_heads),
        vectors=num_entries(specs) - num_entries(specs, "matrix"),
        streams=_streams(config),
        indexer_entries=entries,
        indexer_features=features,
        indexer_is_trained=config.trains_indexer,
        mtp=mtp,
        layer=work_of_layer(config, seq_len),
        mtp_layer=work_of_plain_layer(config),
        fused_layer=work_of_layer(config, seq_len, True) if fuses else None,
        fused_mtp_layer=work_of_plain_layer(config, True) if fuses else None,
        streams_out=streams.work_of_output(config.streams, config.hidden_size) if config.streams else NO_WORK,
    )


def _streams(config: ModelConfig) -> int:
    if config.streams is None:
        return 0
    layers = range(config.num_layers)
    gates = num_entries((spec for layer in layers for spec in streams.parameters(config, layer)), "matrix")
    mixing = 2 * config.num_layers * config.streams.mixing(config.hidden_size)
    return gates + mixing + num_entries(streams.output_parameters(config), "matrix")


def _indexer(config: ModelConfig, seq_len: int) -> tuple[int, int]:
    """Entries and features."""
    if config.indexer is None or not config.indexer.computes(seq_len):
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
