# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution along the tokens of a document (MoME of openPangu 2.0)."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.parameter import declared_parameter


class ConvPlaces(nn.Cell):
    """Slots of tokens (B, 1, T, 3), as for `KVCache`, whose last slot is of padding -> the rows of states that they continue,
    (B,), and where the last width - 1 tokens of each row are among its state's and these, (B, width - 1)."""

    def __init__(self, width: int, capacity: int):
        super().__init__()
        self.kept, self.spare = width - 1, capacity - 1
        self.cut, self.row, self.is_token, self.to_int = ops.StridedSlice(), ops.ReduceMax(), ops.Less(), ops.Cast()
        self.count, self.column, self.places = ops.ReduceSum(), ops.ExpandDims(), ops.Add()

    def construct(self, slots):
        batch, heads, length, _ = slots.shape
        rows = self.row(self.cut(slots, (0, 0, 0, 0), (batch, heads, length, 1), (1, 1, 1, 1)), (1, 2, 3))
        slot = self.cut(slots, (0, 0, 0, 2), (batch, heads, length, 3), (1, 1, 1, 1))
        given = self.count(self.to_int(self.is_token(slot, self.spare), mstype.int32), (1, 2, 3))  # (B,)
        return rows, self.places(self.column(given, 1), _places(self.kept))


@ops.constexpr
def _places(count):
    return Tensor(np.arange(count, dtype=np.int32))


class ConvState(nn.Cell):
    """Inputs of a convolution from the last width - 1 tokens of every row, (R, 1, width - 1, C), written in place."""

    def __init__(self, num_rows: int, kept: int, channels: int, dtype: mstype.Type):
        super().__init__()
        self.kept, self.channels = kept, channels
        self.tokens = Parameter(initializer("zeros", (num_rows, 1, kept, channels), dtype), requires_grad=False)
        self.pick, self.shape, self.join, self.last = ops.Gather(), ops.Reshape(), ops.Concat(1), ops.Gather(1)
        self.column, self.write = ops.ExpandDims(), ops.ScatterNdUpdate()

    def construct(self, x, rows, places):
        """x: (B, T, C); rows, places: from `ConvPlaces`. Returns x after the tokens before, (B, width - 1 + T, C)."""
        batch = x.shape[0]
        before = self.shape(self.pick(self.tokens, rows, 0), (batch, self.kept, self.channels))
        both = self.join((before, x))
        new = self.shape(self.last(both, places, 1), (batch, 1, self.kept, self.channels))
        return ops.depend(both, self.write(self.tokens, self.column(rows, 1), new))


class CausalConv(nn.Cell):
    """z + sum over taps j of weight[:, 0, width - 1 - j] * z of the j-th token before, for rows (B*T, C).

    The first width - 1 tokens of a document are unchanged, so that nothing crosses documents. Source: openPangu 2.0's
    modelling file for transformers.
    """

    def __init__(self, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__()
        self.weight = declared_parameter(specs["weight"])
        self.channels, _, self.width = specs["weight"].shape
        self.dtype = dtype
        self.rows, self.cut, self.empty, self.join = ops.Reshape(), ops.StridedSlice(), ops.ZerosLike(), ops.Concat(1)
        self.tap, self.cast, self.times, self.add = ops.StridedSlice(), ops.Cast(), ops.Mul(), ops.Add()
        self.keep, self.residual, self.flat = ops.Mul(), ops.Add(), ops.Reshape()
        self.is_cached = False

    def attach_cache(self, num_rows: int, capacity: int) -> None:
        """Keep what the last tokens of each of `num_rows` rows gave."""
        self.cache, self.is_cached = ConvState(num_rows, self.width - 1, self.channels, self.dtype), True

    def construct(self, z, where):
        """z: (B*T, C); where: (B, T, 1), 1 from the width-th token of a document on, and with a cache the two of
        `ConvPlaces`. Returns (B*T, C)."""
        batch, length, _ = where[0].shape
        x = self.rows(z, (batch, length, self.channels))
        both = self.cache(x, where[1], where[2]) if self.is_cached else x
        weight = self.cast(self.weight, self.dtype)
        y = self.times(x, self.taps(weight, 0))
        for before in range(1, self.width):
            if self.is_cached or before < length:
                y = self.add(y, self.times(self.moved(both, before, length), self.taps(weight, before)))
        y = self.residual(x, self.keep(y, where[0]))
        return self.flat(y, (batch * length, self.channels))

    def moved(self, x, before, length):
        """The tokens that many places before each of the last `length`, zeros before the first."""
        batch, found, _ = x.shape
        first = max(found - length - before, 0)
        moved = self.cut(x, (0, first, 0), (batch, found - before, self.channels), (1, 1, 1))
        if self.is_cached:
            return moved
        empty = self.empty(self.cut(x, (0, 0, 0), (batch, before, self.channels), (1, 1, 1)))
        return self.join((empty, moved))

    def taps(self, weight, before):
        """Weights of the tokens that many places before, (1, 1, C)."""
        place = self.width - 1 - before
        return self.rows(
            self.tap(weight, (0, 0, place), (self.channels, 1, place + 1), (1, 1, 1)), (1, 1, self.channels)
        )
