# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse attention (DSA)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, number_problems
from sporeloom.models.parts.spec import ONES, QKV, ParameterSpec, Specs, linear
from sporeloom.models.parts.work import NO_WORK, Values, Work

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
    def is_trained(self) -> bool:
        """Whether it has a loss in training."""
        return self.loss_coefficient > 0

    def computes(self, seq_len: int) -> bool:
        """Whether scores are computed: without a loss there is nothing to choose among as many tokens as are chosen."""
        return self.is_trained or seq_len > self.top_k

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


def work_of_tokens(indexer: IndexerConfig) -> Work:
    """Work for each token: queries are rotated and transposed. Every rank of tp does all of the indexer's work."""
    size = indexer.score_features
    if not indexer.is_trained:
        return Work(forward=Values(5 * size))
    return Work(kept=Values(size), forward=Values(5 * size), backward=Values(7 * size))


def work_of_scores(indexer: IndexerConfig) -> Work:
    """Work of a token with each key. Scores of all heads pass a ReLU, are weighed and added up, the highest chosen; the loss
    compares them with the attention's distribution."""
    of_heads = Work(forward=Values(2))
    own = Work(forward=Values(0, 6))
    if indexer.is_trained:
        of_heads = Work(kept=Values(1, 1), forward=Values(3, 1), backward=Values(4, 1))
        own = Work(kept=Values(0, 2), forward=Values(0, 6), backward=Values(0, 5))
    return of_heads.times(indexer.num_heads) + own


def work_of_masks() -> Work:
    """Further work of a token with each key where a kernel computes attention: its mask of bytes becomes one of numbers, to
    which the choice is added, and that becomes one of bytes again."""
    return Work(forward=Values(0, 1.5))


def further_work_of_attention(indexer: IndexerConfig, seq_len: int, num_heads: int) -> Work:
    """Further work of the layer's attention with each key, sharded over tp: its scores wait in memory for the choice."""
    return Work(forward=Values(0, 2)).times(num_heads) if seq_len > indexer.top_k else NO_WORK
