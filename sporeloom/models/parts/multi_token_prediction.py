# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-token prediction, besides the layer in each."""

from __future__ import annotations

from sporeloom.models.parts import norm
from sporeloom.models.parts.spec import MATRIX, LayerSizes, Specs, linear

PREFIX = "mtp."


def own_parameters(sizes: LayerSizes) -> Specs:
    """Parameters of a depth, without those of its layer."""
    for name in ("embedding_norm", "hidden_norm", "head_norm"):
        yield from norm.parameters(name, sizes)
    yield from linear("project", 2 * sizes.hidden_size, sizes.hidden_size, False, MATRIX)
