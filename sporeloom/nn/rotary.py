# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoPE): queries and keys rotated by angles that grow with the position.

Source: arXiv:2104.09864. Angles are computed in float32, as the published models do.
"""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.config import ModelConfig
from sporeloom.models.rope_scaling import frequencies


class Angles(nn.Cell):
    """Positions (B, T) -> cosines and signed sines (B, T, 1, D/H), for features whose pairs are half of `rotated` apart.

    With dynamic scaling the frequencies are those of the length of a token's document: that of its last token in the row.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        rotated, rest = config.rotated, config.rotary_width - config.rotated
        scaling = config.rope_scaling
        self.frequency = Tensor(_frequencies(config, rest))
        factor = scaling.of_angles if scaling else 1.0
        self.sign = Tensor(factor * np.repeat([-1.0, 1.0, 0.0], [rotated // 2, rotated // 2, rest]).astype(np.float32))
        self.expand, self.cast, self.turn = ops.Reshape(), ops.Cast(), ops.Mul()
        self.cos, self.sin, self.flip = ops.Cos(), ops.Sin(), ops.Mul()
        self.has_factor = factor != 1.0
        if self.has_factor:
            self.cos_factor = Tensor(np.repeat([factor, 1.0], [rotated, rest]).astype(np.float32))
            self.scale_cos = ops.Mul()
        self.is_dynamic = scaling is not None and scaling.kind == "dynamic"
        if self.is_dynamic:
            self.stretch = Stretch(config, rest)

    def construct(self, positions):
        batch, length = positions.shape
        places = self.cast(self.expand(positions, (batch, length, 1, 1)), mstype.float32)
        if self.is_dynamic:
            angles = self.turn(places, self.stretch(positions, self.frequency))
        else:
            angles = self.turn(places, self.frequency)  # (B, T, 1, D/H)
        cos = self.cos(angles)
        return self.scale_cos(cos, self.cos_factor) if self.has_factor else cos, self.flip(self.sin(angles), self.sign)


def _frequencies(config, rest):
    """Frequency of each feature, (D/H,) float32, 0 for the last `rest`, which are not rotated."""
    if config.rope_scaling is None:  # as the published models compute it, but for powers by NumPy (see `elementary`)
        exponents = np.arange(0, config.rotated, 2, dtype=np.float32) / np.float32(config.rotated)
        theta = float(np.float32(config.rope_theta))
        half = 1.0 / np.array([theta**exponent for exponent in exponents.tolist()], np.float32)
    else:
        half = np.array(frequencies(config.rope_theta, config.rotated, config.rope_scaling))
    return np.concatenate([half, half, np.zeros(rest)]).astype(np.float32)


class Stretch(nn.Cell):
    """Frequencies of dynamic scaling, (B, T, 1, D/H): theta grows with the length of a token's document, which follows
    from the positions."""

    def __init__(self, config: ModelConfig, rest: int):
        super().__init__()
        scaling, dim = config.rope_scaling, config.rotated
        assert scaling is not None
        self.factor, self.original = scaling.factor, float(scaling.original)
        half = -2.0 * np.arange(dim // 2) / max(dim - 2, 1)  # theta's growth to this power is the frequency's
        self.power = Tensor(np.concatenate([half, half, np.zeros(rest)]).astype(np.float32))
        self.start, self.column, self.row, self.is_same = ops.Sub(), ops.ExpandDims(), ops.ExpandDims(), ops.Equal()
        self.to_int, self.keep, self.last, self.to_float = ops.Cast(), ops.Mul(), ops.ReduceMax(), ops.Cast()
        self.at_least, self.scale, self.less = ops.Maximum(), ops.Mul(), ops.Sub()
        self.expand, self.log, self.times, self.exp, self.multiply = (
            ops.Reshape(),
            ops.Log(),
            ops.Mul(),
            ops.Exp(),
            ops.Mul(),
        )

    def construct(self, positions, frequency):
        batch, length = positions.shape
        starts = self.start(_places(length), positions)
        same = self.to_int(self.is_same(self.column(starts, 2), self.row(starts, 1)), mstype.int32)  # (B, T, T)
        last = self.last(self.keep(same, self.row(positions, 1)), 2)  # (B, T)
        lengths = self.at_least(self.to_float(last, mstype.float32) + 1.0, self.original)
        growth = self.less(self.scale(lengths, self.factor / self.original), self.factor - 1.0)
        growth = self.log(self.expand(growth, (batch, length, 1, 1)))
        return self.multiply(self.exp(self.times(growth, self.power)), frequency)


@ops.constexpr
def _places(count):
    return Tensor(np.arange(count, dtype=np.int32))


class Rotary(nn.Cell):
    """Rotate the first `rope_dim` features of each head, (B, T, H, D/H).

    With adjacent pairs the features are put in the other order first, those of even number before the odd ones: a product
    of queries with keys does not see an order that both have.
    """

    def __init__(self, config: ModelConfig, dtype: mstype.Type):
        super().__init__()
        self.rotated, self.width, self.dtype = config.rotated, config.rotary_width, dtype
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
