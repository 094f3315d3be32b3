# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-token prediction, besides the layer in each."""

from __future__ import annotations

from sporeloom.models.parts import norm
from sporeloom.models.parts.spec import MATRIX, LayerSizes, Specs, linear
from sporeloom.models.parts.work import Values, Work

PREFIX = "mtp."


def own_parameters(sizes: LayerSizes) -> Specs:
    """Parameters of a depth, without those of its layer."""
    for name in ("embedding_norm", "hidden_norm", "head_norm"):
        yield from norm.parameters(name, sizes)
    yield from linear("project", 2 * sizes.hidden_size, sizes.hidden_size, False, MATRIX)


def bytes_of_tables(depths: int) -> tuple[int, int]:
    """Bytes read and written for each entry of the embedding and of the head. For the embedding a gradient of each use and
    their sum, which ranks of tp compute for the whole table without sequence parallelism; for the head those of further
    uses."""
    return 8 * (depths + 1) + 4, 10 * depths


def work(hidden_size: int) -> Work:
    """Work of a depth besides its layer: three norms and a concatenation. The input of the head's norm is not kept: the loss
    of the depth follows at once."""
    both = norm.work(hidden_size, False).times(2)
    joined = Values(2 * hidden_size)
    of_head = norm.work(hidden_size, True)
    return both + Work(kept=joined, forward=joined + of_head.forward, backward=joined + of_head.backward)
