# SPDX-License-Identifier: Apache-2.0
"""Attention with keys and values of each head, or of groups of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sporeloom.models.parts.spec import OUTPUT, QKV, LayerSizes, Specs, linear

if TYPE_CHECKING:
    from sporeloom.models.config import ModelConfig

LLAMA_NAMES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
"""Published name of Llama and similar models, within `self_attn` -> name here, within `attention`."""


def parameters(sizes: LayerSizes) -> Specs:
    yield from linear("attention.query", sizes.hidden_size, sizes.query_size, sizes.qkv_bias, QKV, "tp", "tp")
    yield from linear("attention.key", sizes.hidden_size, sizes.kv_size, sizes.qkv_bias, QKV, "kv", "kv")
    yield from linear("attention.value", sizes.hidden_size, sizes.kv_size, sizes.qkv_bias, QKV, "kv", "kv")
    yield from linear("attention.output", sizes.query_size, sizes.hidden_size, sizes.output_bias, OUTPUT, "tp")


def score_features(sizes: LayerSizes) -> int:
    """Multiplications of a token with each key that it attends to: for the scores and for the context."""
    return 2 * sizes.query_size


def kept_features(sizes: LayerSizes) -> int:
    """Number of values kept of a token for the backward pass, sharded over tp: queries, keys, values, the context."""
    return 2 * sizes.query_size + 2 * sizes.kv_size


def cache_widths(sizes: LayerSizes) -> tuple[int, int]:
    """Width of what the two parameters of a KV cache hold of a token: all its keys, and all its values."""
    return sizes.kv_size, sizes.kv_size


def flash_problem(config: ModelConfig) -> str | None:
    """Why FlashAttentionScore cannot compute it. Source: its documentation in MindSpore 2.9."""
    if config.head_size % 16 or config.head_size > 512:
        return f"heads of {config.head_size} features; it takes multiples of 16 up to 512"
    if config.dropout_rate:
        return f"dropout_rate {config.dropout_rate}; probabilities that are never kept are not dropped"
    return None
