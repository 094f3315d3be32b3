# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution along the tokens of a document (MoME of openPangu 2.0)."""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import Normal, initializer


class CausalConv(nn.Cell):
    """z + sum over taps j of weight[:, 0, width - 1 - j] * z of the j-th token before, for rows (B*T, C).

    The first width - 1 tokens of a document are unchanged, so that nothing crosses documents. Source: openPangu 2.0's
    modelling file for transformers.
    """

    def __init__(self, channels: int, width: int, std: float, dtype: mstype.Type):
        super().__init__()
        self.weight = Parameter(initializer(Normal(std), (channels, 1, width), mstype.float32))
        self.channels, self.width, self.dtype = channels, width, dtype
        self.rows, self.cut, self.empty, self.join = ops.Reshape(), ops.StridedSlice(), ops.ZerosLike(), ops.Concat(1)
        self.tap, self.cast, self.times, self.add = ops.StridedSlice(), ops.Cast(), ops.Mul(), ops.Add()
        self.keep, self.residual, self.flat = ops.Mul(), ops.Add(), ops.Reshape()

    def construct(self, z, inside):  # (B*T, C), (B, T, 1): 1 from the width-th token of a document on -> (B*T, C)
        batch, length, _ = inside.shape
        x = self.rows(z, (batch, length, self.channels))
        weight = self.cast(self.weight, self.dtype)
        y = self.times(x, self.taps(weight, 0))
        for before in range(1, min(self.width, length)):
            moved = self.cut(x, (0, 0, 0), (batch, length - before, self.channels), (1, 1, 1))
            first = self.empty(self.cut(x, (0, 0, 0), (batch, before, self.channels), (1, 1, 1)))
            y = self.add(y, self.times(self.join((first, moved)), self.taps(weight, before)))
        y = self.residual(x, self.keep(y, inside))
        return self.flat(y, (batch * length, self.channels))

    def taps(self, weight, before):
        """Weights of the tokens that many places before, (1, 1, C)."""
        place = self.width - 1 - before
        return self.rows(
            self.tap(weight, (0, 0, place), (self.channels, 1, place + 1), (1, 1, 1)), (1, 1, self.channels)
        )
