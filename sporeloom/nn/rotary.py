# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoPE): queries and keys rotated by angles that grow with the position.

Source: arXiv:2104.09864. Angles are computed in float32, as the published models do.
"""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.config import ModelConfig


class Angles(nn.Cell):
    """Positions (B, T) -> cosines and signed sines (B, T, 1, D/H), for features whose pairs are half of `rotated` apart."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        rotated, rest = config.rotated, config.head_size - config.rotated
        exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
        frequency = 1.0 / np.float32(config.rope_theta) ** exponents
        self.frequency = Tensor(np.concatenate([frequency, frequency, np.zeros(rest)]).astype(np.float32))
        self.sign = Tensor(np.repeat([-1.0, 1.0, 0.0], [rotated // 2, rotated // 2, rest]).astype(np.float32))
        self.expand, self.cast, self.turn = ops.Reshape(), ops.Cast(), ops.Mul()
        self.cos, self.sin, self.flip = ops.Cos(), ops.Sin(), ops.Mul()

    def construct(self, positions):
        batch, length = positions.shape
        places = self.cast(self.expand(positions, (batch, length, 1, 1)), mstype.float32)
        angles = self.turn(places, self.frequency)  # (B, T, 1, D/H)
        return self.cos(angles), self.flip(self.sin(angles), self.sign)


class Rotary(nn.Cell):
    """Rotate the first `rope_dim` features of each head, (B, T, H, D/H).

    With adjacent pairs the features are put in the other order first, those of even number before the odd ones: a product
    of queries with keys does not see an order that both have.
    """

    def __init__(self, config: ModelConfig, dtype: mstype.Type):
        super().__init__()
        self.rotated, self.width, self.dtype = config.rotated, config.head_size, dtype
        self.adjacent = config.rope_pairs == "adjacent"
        self.cut, self.cast = ops.StridedSlice(), ops.Cast()
        self.cos_mul, self.sin_mul, self.add = ops.Mul(), ops.Mul(), ops.Add()
        if self.rotated < self.width:  # other names: another number of inputs, and so of layouts
            self.join_rest, self.join_pairs_rest = ops.Concat(-1), ops.Concat(-1)
        else:
            self.join, self.join_pairs = ops.Concat(-1), ops.Concat(-1)

    def construct(self, x, cos, sin):
        if self.adjacent:
            first, second = self.features(x, 0, self.rotated, 2), self.features(x, 1, self.rotated, 2)
        else:
            half = self.rotated // 2
            first, second = self.features(x, 0, half), self.features(x, half, self.rotated)
        if self.rotated < self.width:
            rest = self.features(x, self.rotated, self.width)
            swapped = self.join_rest((second, first, rest))
            x = self.join_pairs_rest((first, second, rest)) if self.adjacent else x
        else:
            swapped = self.join((second, first))
            x = self.join_pairs((first, second)) if self.adjacent else x
        return self.cast(self.add(self.cos_mul(x, cos), self.sin_mul(swapped, sin)), self.dtype)

    def features(self, x, start, stop, step=1):
        batch, length, heads, _ = x.shape
        return self.cut(x, (0, 0, 0, start), (batch, length, heads, stop), (1, 1, 1, step))
