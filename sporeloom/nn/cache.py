# SPDX-License-Identifier: Apache-2.0
"""Caches between attention's projections and its products: none, or keys and values kept for later tokens."""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer


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
