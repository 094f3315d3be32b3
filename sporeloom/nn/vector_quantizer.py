# SPDX-License-Identifier: Apache-2.0
"""Vectors as int8, each with a scale of its own."""

from mindspore import dtype as mstype
from mindspore import nn, ops

MIN_SIZE = 1e-30
"""Magnitude below which a vector counts as 0."""


class VectorQuantizer(nn.Cell):
    """Vectors (..., D) as int8, each with its scale (..., 1): the number furthest from 0 becomes 127 or -127. The scale of a
    vector with an entry that is not finite is NaN, and so is what it becomes again."""

    def __init__(self):
        super().__init__()
        self.cast, self.size, self.furthest = ops.Cast(), ops.Abs(), ops.ReduceMax(keep_dims=True)
        self.usable, self.scale, self.divide = ops.Maximum(), ops.Div(), ops.Div()
        self.round, self.narrow = ops.Rint(), ops.Cast()
        self.is_finite, self.invert = ops.IsFinite(), ops.LogicalNot()
        self.to_infinity, self.to_nan = ops.MaskedFill(), ops.MaskedFill()

    def construct(self, x):
        q, scale = self.rounded(x)
        return self.narrow(q, mstype.int8), scale

    def rounded(self, x):
        """The same with whole numbers in float32. Ranks that shard D all-reduce one number a vector."""
        x = self.cast(x, mstype.float32)
        size = self.to_infinity(self.size(x), self.invert(self.is_finite(x)), float("inf"))
        scale = self.scale(self.usable(self.furthest(size, -1), MIN_SIZE), 127.0)
        q = self.round(self.divide(x, scale))
        return q, self.to_nan(scale, self.invert(self.is_finite(scale)), float("nan"))
