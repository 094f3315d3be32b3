# SPDX-License-Identifier: Apache-2.0
"""LayerNorm over the last dimension."""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer


class LayerNorm(nn.Cell):
    """Biased variance, computed in float32 whatever the input's dtype is."""

    def __init__(self, hidden_size: int, epsilon: float, dtype: mstype.Type = mstype.float32):
        super().__init__()
        self.weight = Parameter(initializer("ones", (hidden_size,), mstype.float32))
        self.bias = Parameter(initializer("zeros", (hidden_size,), mstype.float32))
        self.dtype = dtype
        self.layer_norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=epsilon)
        self.cast = ops.Cast()

    def construct(self, x):  # (N, D) -> (N, D)
        y, _, _ = self.layer_norm(self.cast(x, mstype.float32), self.weight, self.bias)
        return self.cast(y, self.dtype)
