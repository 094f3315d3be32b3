# SPDX-License-Identifier: Apache-2.0
"""Work of a layer with latent attention, put together from what its parts declare: products, passes over memory and kept
values, by how they are sharded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import attention_specs
from sporeloom.models.parts import indexer, latent_attention, norm, streams
from sporeloom.models.parts.spec import OUTPUT
from sporeloom.models.parts.work import NO_WORK, Values, Work


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer that every token is multiplied with."""

    inner: int
    outer: int
    cut: str = ""
    """Side that tensor parallelism shards: `inner`, `outer`, or none."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """Work of a token in a layer, mean of all layers; without MLP, experts and router."""

    matrices: tuple[Matrix, ...]
    by_tokens: Work
    """Sharded by sequence parallelism, else done by every rank of tp: norms, residual streams, the indexer."""
    by_tokens_keys: Work
    """The same with each key."""
    whole: Work
    """Done by every rank of tp: latents."""
    cut: Work
    """Sharded by tp: heads."""
    cut_keys: Work
    """The same with each key."""
    selective_keys: Work
    """In place of it what selective recomputation keeps, and its passes over memory."""
    num_heads: int
    score_features: float
    """Multiplications with each key for scores and context, of products."""
    kernel_features: float = 0
    """The same of a kernel."""
    num_sinks: int = 0
    latent_width: int = 0
    """Features whose gradients are added up over tp in place of the layer's input: of both latents and the shared key."""
    gathered_width: int = 0
    """Features of keys and values that context parallelism gathers, of all heads."""
    gathered_key: int = 0
    """Features of the key that heads share."""
    key_features: float = 0
    """Features of keys and values that are kept of each key, of all heads."""
    indexer_share: float = 0.0
    """Fraction of the layers whose indexer computes scores."""
    indexer_matrices: tuple[Matrix, ...] = ()
    indexer_features: int = 0
    indexer_is_trained: bool = False
    float32_flops: float = 0.0
    """FLOPs of products of residual streams, with as many for either gradient."""
    float32_bytes: float = 0.0
    """Bytes that these products read and write."""
    num_streams: int = 1

    def keys(self, seq_len: int) -> int:
        """Number of keys of a token."""
        return seq_len + self.num_sinks

    def num_bytes(
        self, seq_len: int, spread: int, tp: int, phase: str, width: int, is_selective: bool = False
    ) -> float:
        """Bytes of a token on a device: `kept`, or read and written in the `forward` or `backward` pass.

        Args:
            spread: ranks over which sequence parallelism shards.
            is_selective: where attention is recomputed.
        """

        def of(work: Work) -> float:
            values: Values = getattr(work, phase)
            return values.num_bytes(width)

        scores = self.keys(seq_len) * of(self.selective_keys if is_selective else self.cut_keys)
        by_tokens = of(self.by_tokens) + seq_len * of(self.by_tokens_keys)
        return by_tokens / spread + of(self.whole) + (of(self.cut) + scores) / tp


def work_of_layer(config: ModelConfig, seq_len: int, flash: bool = False) -> LayerWork | None:
    """Work of a layer; None: its attention is not latent. `flash`: where a kernel computes attention, but for layers whose
    indexer is trained."""
    plain = work_of_plain_layer(config, flash)
    if plain is None:
        return None
    found = plain
    if config.streams:
        products, moved = streams.float32_products(config.streams, config.hidden_size)
        found = replace(
            found,
            by_tokens=plain.by_tokens + streams.work(config.streams, config.hidden_size, config.num_layers),
            float32_flops=2 * products,
            float32_bytes=moved,
            num_streams=config.streams.num_streams,
        )
    of = config.indexer
    if of is None or not of.layers or not of.computes(seq_len):
        return found
    share = sum(map(config.has_indexer, range(config.num_layers))) / config.num_layers
    specs = indexer.parameters(config, of.layers[0])
    if flash and of.is_trained:
        found = _partly_plain(found, config, share)
    scores, waiting = indexer.work_of_scores(of), NO_WORK
    if not flash or of.is_trained:
        waiting = indexer.further_work_of_attention(of, seq_len, config.num_heads)
    if flash:
        scores += indexer.work_of_masks()
    return replace(
        found,
        by_tokens=found.by_tokens + indexer.work_of_tokens(of).times(share),
        by_tokens_keys=scores.times(share),
        cut_keys=found.cut_keys + waiting.times(share),
        indexer_share=share,
        indexer_matrices=tuple(Matrix(spec.shape[1], spec.shape[0]) for spec in specs if spec.use == "matrix"),
        indexer_features=of.score_features,
        indexer_is_trained=of.is_trained,
    )


def _partly_plain(kernel: LayerWork, config: ModelConfig, share: float) -> LayerWork:
    """Mean of layers of which a `share` has plain attention."""
    plain = work_of_plain_layer(config)
    assert plain is not None
    return replace(
        kernel,
        cut=kernel.cut.times(1 - share) + plain.cut.times(share),
        cut_keys=plain.cut_keys.times(share),
        score_features=plain.score_features * share,
        kernel_features=kernel.kernel_features * (1 - share),
        key_features=kernel.key_features * (1 - share) + plain.key_features * share,
    )


def work_of_plain_layer(config: ModelConfig, flash: bool = False) -> LayerWork | None:
    """Work of a layer without residual streams and indexer, as those of multi-token prediction are."""
    latent, heads = config.latent, config.num_heads
    if latent is None:
        return None
    matrices = [
        Matrix(
            spec.shape[1],
            spec.shape[0],
            "" if spec.sharding == "whole" else "inner" if spec.init == OUTPUT else "outer",
        )
        for spec in attention_specs(config)
        if spec.use == "matrix"
    ]
    return LayerWork(
        matrices=tuple(matrices),
        by_tokens=norm.work_of_block(config.block, config.hidden_size),
        whole=latent_attention.work_of_latents(latent),
        by_tokens_keys=NO_WORK,
        cut=latent_attention.work_of_kernel(latent, heads) if flash else latent_attention.work_of_heads(latent, heads),
        cut_keys=NO_WORK if flash else latent_attention.work_of_scores(heads),
        selective_keys=latent_attention.recomputed_scores(heads),
        num_heads=heads,
        score_features=0 if flash else latent.score_features(heads),
        kernel_features=2 * heads * latent.head_size if flash else 0,
        num_sinks=latent.num_sinks,
        latent_width=(latent.query_width or config.hidden_size) + latent.kv_width + latent.rope_dim,
        gathered_width=heads * latent.key_value_size,
        gathered_key=latent.rope_dim,
        key_features=heads * (latent.head_size + (latent.head_size if flash else latent.value_dim)),
    )
