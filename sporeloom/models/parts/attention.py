# SPDX-License-Identifier: Apache-2.0
"""Attention with keys and values of each head, or of groups of heads."""

from __future__ import annotations

from sporeloom.models.parts.spec import LayerSizes, Specs, linear

LLAMA_NAMES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
"""Published name of Llama and similar models, within `self_attn` -> name here, within `attention`."""


def parameters(sizes: LayerSizes) -> Specs:
    yield from linear("attention.query", sizes.hidden_size, sizes.query_size, sizes.qkv_bias, "tp", "tp")
    yield from linear("attention.key", sizes.hidden_size, sizes.kv_size, sizes.qkv_bias, "kv", "kv")
    yield from linear("attention.value", sizes.hidden_size, sizes.kv_size, sizes.qkv_bias, "kv", "kv")
    yield from linear("attention.output", sizes.query_size, sizes.hidden_size, sizes.output_bias, "tp")


def score_features(sizes: LayerSizes) -> int:
    """Multiplications of a token with each key that it attends to: for the scores and for the context."""
    return 2 * sizes.query_size


def kept_features(sizes: LayerSizes) -> int:
    """Number of values kept of a token for the backward pass, sharded over tp: queries, keys, values, the context."""
    return 2 * sizes.query_size + 2 * sizes.kv_size


def cache_widths(sizes: LayerSizes) -> tuple[int, int]:
    """Width of what the two parameters of a KV cache hold of a token: all its keys, and all its values."""
    return sizes.kv_size, sizes.kv_size
