# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution along the tokens of a document (MoME of openPangu 2.0)."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.parameter import declared_parameter


class ConvPlaces(nn.Cell):
    """Slots of tokens (B, 1, T, 3), as for `KVCache`, whose last slot is of padding -> where states continue (see
    `ConvState`): the rows (B,), cells to read, and where to write.

    Args:
        kept: cells of a row besides that of padding; with drafts of k tokens at least width + k.
    """

    def __init__(self, width: int, capacity: int, kept: int):
        super().__init__()
        self.before, self.kept, self.spare = width - 1, kept, capacity - 1
        self.cut, self.row, self.is_token, self.to_int = ops.StridedSlice(), ops.ReduceMax(), ops.Less(), ops.Cast()
        self.count, self.column, self.flat = ops.ReduceSum(), ops.ExpandDims(), ops.Reshape()
        self.onwards, self.cell, self.padding, self.either = ops.Add(), ops.FloorMod(), ops.Mul(), ops.Maximum()
        self.back, self.up_to, self.distance, self.join = ops.Sub(), ops.Sub(), ops.FloorMod(), ops.Concat(3)

    def construct(self, slots):
        batch, heads, length, _ = slots.shape
        rows = self.row(self.cut(slots, (0, 0, 0, 0), (batch, heads, length, 1), (1, 1, 1, 1)), (1, 2, 3))
        slot = self.cut(slots, (0, 0, 0, 2), (batch, heads, length, 3), (1, 1, 1, 1))
        if length == 1:
            here = self.either(self.cell(slot, self.kept), self.padding(self.back(slot, self.spare - 1), self.kept))
            here = self.join((self.cut(slots, (0, 0, 0, 0), (batch, heads, 1, 2), (1, 1, 1, 1)), here))
            start = self.flat(slot, (batch, 1))
            return rows, self.cell(self.onwards(start, _places(self.before, self.kept - self.before)), self.kept), here
        given = self.column(
            self.count(self.to_int(self.is_token(slot, self.spare), mstype.int32), (1, 2, 3)), 1
        )  # (B, 1)
        start = self.flat(self.cut(slot, (0, 0, 0, 0), (batch, heads, 1, 1), (1, 1, 1, 1)), (batch, 1))
        cells = self.cell(self.onwards(start, _places(self.kept)), self.kept)
        ahead = self.up_to(_places(self.kept + 1), self.onwards(start, given))
        return rows, cells, self.onwards(given, self.distance(ahead, self.kept))


@ops.constexpr
def _places(count, first=0):
    return Tensor(np.arange(first, first + count, dtype=np.int32))


class ConvState(nn.Cell):
    """Inputs of a convolution from the last tokens of every row, (R, 1, N + 1, C), written in place: that of slot s in cell
    s % N, and of padding in the last. A token that is taken back is overwritten by the next one there."""

    def __init__(self, num_rows: int, kept: int, channels: int, dtype: mstype.Type):
        super().__init__()
        self.num_cells, self.channels = kept + 1, channels
        self.tokens = Parameter(
            initializer("zeros", (num_rows, 1, self.num_cells, channels), dtype), requires_grad=False
        )
        self.pick, self.shape, self.join, self.gather = ops.Gather(), ops.Reshape(), ops.Concat(1), ops.Gather(1)
        self.column, self.write, self.append = ops.ExpandDims(), ops.ScatterNdUpdate(), ops.ScatterNdUpdate()

    def construct(self, x, rows, before, after):
        """x: (B, T, C); rows, before, after: from `ConvPlaces`. Returns x behind the tokens before, (B, n + T, C).

        Of a single token a row several may be of one row of the states: all are written before any is read.
        """
        batch, length, _ = x.shape
        if length == 1:
            tokens = self.append(self.tokens, after, self.shape(x, (batch, 1, 1, self.channels)))
            return self.join((self.read(tokens, rows, before), x))
        both = self.join((self.read(self.tokens, rows, before), x))
        new = self.shape(self.gather(both, after, 1), (batch, 1, self.num_cells, self.channels))
        return ops.depend(both, self.write(self.tokens, self.column(rows, 1), new))

    def read(self, tokens, rows, cells):
        held = self.shape(self.pick(tokens, rows, 0), (rows.shape[0], self.num_cells, self.channels))
        return self.gather(held, cells, 1)


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

    def attach_cache(self, num_rows: int, num_drafts: int) -> None:
        """Keep what the last tokens of each of `num_rows` rows gave, so many that `num_drafts` can be taken back."""
        self.cache, self.is_cached = ConvState(num_rows, self.width + num_drafts, self.channels, self.dtype), True

    def construct(self, z, where):
        """z: (B*T, C); where: (B, T, 1), 1 from the width-th token of a document on, and with a cache the three of
        `ConvPlaces`. Returns (B*T, C)."""
        batch, length, _ = where[0].shape
        x = self.rows(z, (batch, length, self.channels))
        both = self.cache(x, where[1], where[2], where[3]) if self.is_cached else x
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
