# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse attention (DSA)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, number_problems
from sporeloom.models.parts.spec import ONES, QKV, ParameterSpec, Specs, linear

if TYPE_CHECKING:
    from sporeloom.models.config import ModelConfig

PATTERN = "*.attention.indexer.*"
"""Pattern of the names of its parameters."""


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Sparse attention (DSA): of the visible tokens a query attends to those whose scores by small heads of their own are
    highest. Source: DeepSeek-V3.2-Exp."""

    layers: tuple[Natural, ...]
    """Numbers of the layers that have it."""
    top_k: Count
    """Number of tokens that a query attends to; equal scores at the limit all count."""
    num_heads: Count
    head_dim: Count
    norm_epsilon: Positive = 1e-6
    """Epsilon of the norm of its keys."""
    loss_coefficient: NotNegative = 0.0
    """Coefficient of the KL loss that alone trains the indexer: of the attention's distribution over tokens, summed over
    heads, and the softmax of the indexer's scores. 0: the indexer is frozen."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if problems := list(number_problems(self, lambda name: f"indexer.{name}")):
            raise ConfigError(problems)

    @property
    def score_features(self) -> int:
        """Multiplications of a token with each key."""
        return self.num_heads * self.head_dim


def parameters(config: ModelConfig, layer: int) -> Specs:
    indexer, latent = config.indexer, config.latent
    if indexer and latent and config.has_indexer(layer) and latent.query_width:
        size = indexer.head_dim
        yield from linear("attention.indexer.query", latent.query_width, indexer.num_heads * size, False, QKV)
        yield from linear("attention.indexer.key", config.hidden_size, size, False, QKV)
        yield ParameterSpec("attention.indexer.key_norm.weight", (size,), ONES)
        yield from linear("attention.indexer.weights", config.hidden_size, indexer.num_heads, False, QKV)


def problems(config: ModelConfig, indexer: IndexerConfig) -> Iterator[str]:
    """Describe what does not fit the model."""
    latent = config.latent
    if wrong := [layer for layer in indexer.layers if layer >= config.num_layers]:
        yield f"indexer.layers: there is no layer {wrong[0]}; the last one is {config.num_layers - 1}"
    if latent and not latent.query_width:
        yield "indexer needs latent.query_width"
    if latent and indexer.head_dim < latent.rope_dim:
        yield f"indexer.head_dim {indexer.head_dim} is less than latent.rope_dim {latent.rope_dim}"
