# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask is a function of numbers alone, so that it is the same under every mesh, after a resume and when
recomputed.

Each token of each sample has a key (`sporeloom.data.batch.dropout_keys`), each column of each place in the model two
constants; an entry is kept where (key + u) (key + v), modulo 2^32, is not among the smallest. One multiplication mixes
enough: the comparison depends on the product's upper bits, and those on all bits of both factors.
"""

import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

NUM_PARTS = 3
"""Number of arrays of constants of a dropout."""


def drawn_constants(site: int, part: int, count: int) -> NDArray[np.int32]:
    """(count,): random odd numbers of one position in the model, int32."""
    drawn = np.random.default_rng((site, part)).integers(-(2**31), 2**31, count)
    return (drawn | 1).astype(np.int32)


@ops.constexpr
def _constants(site, part, count):
    return Tensor(drawn_constants(site, part, count))


class Dropout(nn.Cell):
    """Zeroes a share of the entries of (N, D) while training, and scales the others up; nothing at rate 0."""

    def __init__(self, rate: float):
        super().__init__()
        self.active = rate > 0
        self.site = 0  # number of this dropout in the model, see `number_dropouts`
        self.lowest_kept = round(rate * 2**32) - 2**31
        self.keep_scale = 1.0 / (1.0 - rate)
        self.reshape, self.add_u, self.add_v, self.mix = ops.Reshape(), ops.Add(), ops.Add(), ops.Mul()
        self.keep, self.cast, self.scale, self.drop = ops.GreaterEqual(), ops.Cast(), ops.Mul(), ops.Mul()
        self.wait, self.stop = ops.Depend(), ops.StopGradient()

    def construct(self, x, keys):  # keys: (B, T) int32, those of the N = B*T tokens; None when not training
        if self.active and self.training:
            width = x.shape[-1]
            # Executors run what is ready: without waiting, the masks of all layers are computed first, and held.
            rows = self.keys_of_rows(x, self.wait(keys, self.stop(x)))
            u = self.add_u(rows, _constants(self.site, 0, width))
            v = self.add_v(rows, _constants(self.site, 1, width))
            kept = self.cast(self.keep(self.mix(u, v), self.lowest_kept), x.dtype)
            x = self.drop(x, self.scale(kept, self.keep_scale))
        return x

    def keys_of_rows(self, x, keys):
        return self.reshape(keys, (-1, 1))


class AttentionDropout(Dropout):
    """The same for attention probabilities (B, H, T, keys), other masks for each head."""

    def __init__(self, rate: float):
        super().__init__(rate)
        self.per_head = ops.Mul()

    def keys_of_rows(self, x, keys):
        batch, heads, length, _ = x.shape
        per_head = self.reshape(_constants(self.site, 2, heads), (1, heads, 1, 1))
        return self.per_head(self.reshape(keys, (batch, 1, length, 1)), per_head)


def number_dropouts(model: nn.Cell) -> None:
    """Give each dropout in a model its own number, and so its own masks."""
    dropouts = [cell for _, cell in model.cells_and_names() if isinstance(cell, Dropout)]
    for site, cell in enumerate(dropouts):
        cell.site = site
