# SPDX-License-Identifier: Apache-2.0
"""Caches between attention's projections and its products: none, or keys and values kept for later tokens."""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from sporeloom.nn.vector_quantizer import VectorQuantizer


class NoCache(nn.Cell):
    """For full sequences: keys and values are unchanged."""

    def construct(self, k, v, slots):
        return k, v


class KeyCache(nn.Cell):
    """Keys of every row's tokens, (R, KV, S, D/H): R rows of S slots, written in place."""

    picks_rows = False
    """Whether a batch as large as the cache may have its rows in any order, and more than once."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: mstype.Type):
        super().__init__()
        self.num_rows = shape[0]
        self.keys = Parameter(initializer("zeros", shape, dtype), requires_grad=False)
        self.append_keys, self.rows, self.row, self.pick_keys = (
            ops.ScatterNdUpdate(),
            ops.StridedSlice(),
            ops.ReduceMax(),
            ops.Gather(),
        )

    def construct(self, k, slots):
        """k: (B, KV, T, D/H); slots: (B, KV, T, 3), as for `KVCache`. Returns all keys of the B rows."""
        keys = self.append_keys(self.keys, slots, k)
        if slots.shape[0] == self.num_rows and not self.picks_rows:
            return keys
        return self.pick_keys(keys, self.row_of(slots), 0)

    def row_of(self, slots):
        batch, heads, length, _ = slots.shape
        return self.row(self.rows(slots, (0, 0, 0, 0), (batch, heads, length, 1), (1, 1, 1, 1)), (1, 2, 3))


class KVCache(KeyCache):
    """Keys and values of every row's tokens, (R, KV, S, D/H) each: R rows of S slots, written in place. Values may be
    of another width."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: mstype.Type, value_width: int | None = None):
        super().__init__(shape, dtype)
        of_values = (*shape[:3], value_width or shape[3])
        self.values = Parameter(initializer("zeros", of_values, dtype), requires_grad=False)
        self.append_values, self.pick_values = ops.ScatterNdUpdate(), ops.Gather()

    def construct(self, k, v, slots):
        """k, v: (B, KV, T, D/H); slots: (B, KV, T, 3), the row, head and slot of each among those this device holds.

        Returns all keys and values of the B rows: where those are not all R rows, or with `picks_rows`, of the ones that
        `slots` names.
        """
        keys, values = self.append_keys(self.keys, slots, k), self.append_values(self.values, slots, v)
        if slots.shape[0] == self.num_rows and not self.picks_rows:
            return keys, values
        row = self.row_of(slots)
        return self.pick_keys(keys, row, 0), self.pick_values(values, row, 0)

    def operands(self):
        """Parameters that a kernel reads and writes."""
        return (self.keys, self.values)


class Int8KVCache(KeyCache):
    """Keys and values like `KVCache`, in int8 with a scale for each token's vector in each head, (R, KV, S, 1)."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: mstype.Type):
        super().__init__(shape, mstype.int8)
        self.dtype, of_scales = dtype, (*shape[:3], 1)
        self.values = Parameter(initializer("zeros", shape, mstype.int8), requires_grad=False)
        self.key_scales = Parameter(initializer("zeros", of_scales, mstype.float32), requires_grad=False)
        self.value_scales = Parameter(initializer("zeros", of_scales, mstype.float32), requires_grad=False)
        self.quantize_keys, self.quantize_values = VectorQuantizer(), VectorQuantizer()
        self.append_values, self.append_key_scales, self.append_value_scales = (ops.ScatterNdUpdate() for _ in range(3))
        self.pick_values, self.pick_key_scales, self.pick_value_scales = (ops.Gather() for _ in range(3))
        self.widen, self.rescale_keys, self.rescale_values = ops.Cast(), ops.Mul(), ops.Mul()

    def construct(self, k, v, slots):
        """Like `KVCache`: what is returned is what the cache holds, for new keys and values as well."""
        k, of_k = self.quantize_keys(k)
        v, of_v = self.quantize_values(v)
        keys, key_scales = self.append_keys(self.keys, slots, k), self.append_key_scales(self.key_scales, slots, of_k)
        values = self.append_values(self.values, slots, v)
        value_scales = self.append_value_scales(self.value_scales, slots, of_v)
        if slots.shape[0] != self.num_rows or self.picks_rows:
            row = self.row_of(slots)
            keys, key_scales = self.pick_keys(keys, row, 0), self.pick_key_scales(key_scales, row, 0)
            values, value_scales = self.pick_values(values, row, 0), self.pick_value_scales(value_scales, row, 0)
        keys = self.rescale_keys(self.widen(keys, mstype.float32), key_scales)
        values = self.rescale_values(self.widen(values, mstype.float32), value_scales)
        return self.widen(keys, self.dtype), self.widen(values, self.dtype)

    def operands(self):
        """Parameters that a kernel reads and writes."""
        return (self.keys, self.values, self.key_scales, self.value_scales)
