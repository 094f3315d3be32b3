# SPDX-License-Identifier: Apache-2.0
"""Dimensions of multi-head latent attention (MLA). Source: arXiv:2405.04434 section 2.1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, Positive, number_problems


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention: keys and values of all heads are products of one short vector (latent) of each token, and of one
    rotated key that the heads share. Only these two are cached."""

    kv_width: Count
    """Width of the latent of keys and values."""
    query_width: Count | None = None
    """Width of the latent of queries; default: queries are products of the layer's input."""
    nope_dim: Count
    """Features of each head's queries and keys without positions."""
    rope_dim: Count
    """Features of each head's queries, and of the one shared key, that RoPE rotates."""
    value_dim: Count
    """Width of each head's values."""
    norm_epsilon: Positive = 1e-6
    """Epsilon of the norms of both latents."""
    num_sinks: Natural = 0
    """Number of learned latents and shared keys in front of all tokens, which every token attends to, too."""
    conv_width: Natural = 0
    """Width of depthwise causal convolutions (MoME) of both latents and of the attention's output; 0: none."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        yield from number_problems(self, lambda name: f"latent.{name}")
        if self.rope_dim % 2:
            yield f"latent.rope_dim {self.rope_dim} must be even"
        if self.conv_width and self.query_width is None:
            yield "latent.conv_width needs latent.query_width"

    @property
    def head_size(self) -> int:
        """Width of each head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def key_value_size(self) -> int:
        """Width of each head's features that come from the latent: its key without position, and its value."""
        return self.nope_dim + self.value_dim
