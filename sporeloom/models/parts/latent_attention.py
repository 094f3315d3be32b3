# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA). Source: arXiv:2405.04434 section 2.1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, Positive, number_problems
from sporeloom.models.parts import norm
from sporeloom.models.parts.spec import MATRIX, ONES, OUTPUT, QKV, ParameterSpec, Specs, linear
from sporeloom.models.parts.work import Values, Work

if TYPE_CHECKING:
    from sporeloom.models.config import ModelConfig


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
        if self.conv_width == 1:
            yield "latent.conv_width 1 sees no token before; the least is 2, and 0 is none"
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

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Width of what the two parameters of a KV cache hold of a token: its latent, and its shared key."""
        return self.kv_width, self.rope_dim

    @property
    def flash_problem(self) -> str | None:
        """Why FlashAttentionScore, which takes values as wide as keys, cannot compute it (see
        `sporeloom.nn.latent_attention`)."""
        if self.rope_dim <= self.value_dim <= self.head_size:
            return None
        return (
            f"values of {self.value_dim} features; latent attention takes {self.rope_dim} to {self.head_size} of them"
        )

    def score_features(self, num_heads: int) -> int:
        """Multiplications of a token with each key that it attends to: for the scores and for the context."""
        return num_heads * (self.head_size + self.value_dim)

    def sink_entries(self, num_heads: int) -> int:
        """Entries of the matrix that the sinks' latents pass in each layer."""
        return self.kv_width * num_heads * self.key_value_size


def parameters(config: ModelConfig, latent: LatentConfig) -> Specs:
    d, heads = config.hidden_size, config.num_heads
    if latent.query_width:
        yield from linear("attention.query_down", d, latent.query_width, config.qkv_bias, QKV)
        yield ParameterSpec("attention.query_norm.weight", (latent.query_width,), ONES)
        yield from linear("attention.query_up", latent.query_width, heads * latent.head_size, False, QKV, "tp")
    else:
        yield from linear("attention.query", d, heads * latent.head_size, False, QKV, "tp")
    yield from linear("attention.kv_down", d, latent.kv_width + latent.rope_dim, config.qkv_bias, QKV)
    yield ParameterSpec("attention.kv_norm.weight", (latent.kv_width,), ONES)
    yield from linear("attention.kv_up", latent.kv_width, heads * latent.key_value_size, False, QKV, "tp")
    yield from linear("attention.output", heads * latent.value_dim, d, config.output_bias, OUTPUT, "tp")
    if latent.num_sinks:
        yield ParameterSpec("attention.sink_latents", (latent.num_sinks, latent.kv_width), QKV, "sink")
        yield ParameterSpec("attention.sink_keys", (latent.num_sinks, latent.rope_dim), QKV, "sink")
    if latent.conv_width and latent.query_width:
        widths = {"query": latent.query_width, "kv": latent.kv_width, "output": heads * latent.value_dim}
        for name, size in widths.items():
            yield ParameterSpec(f"attention.{name}_conv.weight", (size, 1, latent.conv_width), MATRIX, "channels")


def work_of_latents(latent: LatentConfig) -> Work:
    """Work that every rank of tp does: norms and convolutions of both latents."""
    total = Work()
    for width in (latent.query_width or 0, latent.kv_width):
        total += norm.work(width, True) + _convolution(latent, width)
    return total


def work_of_heads(latent: LatentConfig, num_heads: int) -> Work:
    """Work that is sharded over tp. Kept are queries, keys, values and the context; they are transposed and rotated, and
    products of scores and context read them."""
    features = num_heads * 2 * (latent.head_size + latent.value_dim)
    rotated = num_heads * latent.rope_dim
    own = Work(
        kept=Values(features),
        forward=Values(3 * features + 2 * rotated),
        backward=Values(4 * features + 8 * rotated),
    )
    return own + _convolution(latent, num_heads * latent.value_dim)


def work_of_kernel(latent: LatentConfig, num_heads: int) -> Work:
    """The same where a kernel computes attention: values and their context are as wide as keys, the context is kept with
    this width and without, and the kernel keeps two rows of 8 numbers."""
    wide = 4 * latent.head_size
    rotated = num_heads * latent.rope_dim
    own = Work(
        kept=Values(num_heads * (wide + latent.value_dim), 16 * num_heads),
        forward=Values(num_heads * (2 * wide + latent.value_dim) + 2 * rotated),
        backward=Values(num_heads * (2 * wide + latent.value_dim) + 8 * rotated),
    )
    return own + _convolution(latent, num_heads * latent.value_dim)


def work_of_scores(num_heads: int) -> Work:
    """Work of a token with each key, sharded over tp. A product writes scores, and the softmax probabilities, in float32 and
    in the type of the product with the values."""
    one = Work(kept=Values(0, 1, 2), forward=Values(3, 1, 2), backward=Values(6, 1))
    return one.times(num_heads)


def recomputed_scores(num_heads: int) -> Work:
    """The same with selective recomputation: scores are kept, and the softmax is recomputed from them."""
    return Work(kept=Values(1), forward=Values(1, 1, 2)).times(num_heads)


def _convolution(latent: LatentConfig, channels: int) -> Work:
    """Work of a causal convolution, which keeps its input as each tap sees it."""
    taps = Values(latent.conv_width * channels)
    return Work(kept=taps, forward=taps, backward=taps.times(2))
