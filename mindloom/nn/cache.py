# SPDX-License-Identifier: Apache-2.0
"""What attention does with its keys and values before it uses them: nothing, or keep them for the tokens to come."""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer


class NoCache(nn.Cell):
    """For whole sequences: keys and values as they are."""

    def construct(self, k, v, slots):
        return k, v


class KVCache(nn.Cell):
    """Keys and values of every row's tokens, (B, KV, S, D/H) each: S slots a row, written in place."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: mstype.Type):
        super().__init__()
        self.keys = Parameter(initializer("zeros", shape, dtype), requires_grad=False)
        self.values = Parameter(initializer("zeros", shape, dtype), requires_grad=False)
        self.append_keys, self.append_values = ops.ScatterNdUpdate(), ops.ScatterNdUpdate()

    def construct(self, k, v, slots):
        """k, v: (B, KV, T, D/H); slots: (B, KV, T, 3), the row, head and slot of each among those this device holds."""
        return self.append_keys(self.keys, slots, k), self.append_values(self.values, slots, v)
