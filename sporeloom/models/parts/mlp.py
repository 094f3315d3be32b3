# SPDX-License-Identifier: Apache-2.0
"""MLPs of two matrices, and gated ones of three."""

from __future__ import annotations

from sporeloom.models.parts.spec import MATRIX, OUTPUT, LayerSizes, Specs, linear
from sporeloom.models.parts.work import Values, Work

LLAMA_NAMES = {"down_proj": "down"}
"""Published name of Llama and similar models, within `mlp` -> name here. Others have names that differ between models."""


def parameters(name: str, sizes: LayerSizes, width: int) -> Specs:
    if sizes.gated_mlp:
        yield from linear(f"{name}.gate", sizes.hidden_size, width, sizes.mlp_bias, MATRIX, "tp", "tp")
    yield from linear(f"{name}.up", sizes.hidden_size, width, sizes.mlp_bias, MATRIX, "tp", "tp")
    yield from linear(f"{name}.down", width, sizes.hidden_size, sizes.mlp_bias, OUTPUT, "tp")


def num_matrices(sizes: LayerSizes) -> int:
    return 3 if sizes.gated_mlp else 2


def kept_features(sizes: LayerSizes, width: int) -> int:
    """Number of values kept of a token for the backward pass, sharded over tp: those between the matrices."""
    return num_matrices(sizes) * width


def work(sizes: LayerSizes, width: int) -> Work:
    """Work between the matrices, sharded over tp. Operators of a gated MLP (SwiGLU) keep gate, up, the sigmoid, the
    activation and the product; others keep the activation's input and result."""
    kept, backward = (5, 8) if sizes.gated_mlp else (2, 3)
    return Work(kept=Values(kept * width), forward=Values(kept * width), backward=Values(backward * width))
