# SPDX-License-Identifier: Apache-2.0
"""Matrix product, with a bias or without."""

from mindspore import Parameter, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import Normal, initializer

from sporeloom.nn.multi_lora import AdaptedProduct

MAX_KERNEL_ROWS = 256
"""Maximum number of rows for a compiled kernel, where there is one (`sporeloom.inference.kernels`)."""


class Linear(AdaptedProduct):
    """y = x W^T + b, with W (out, in) and b (out,) in float32, computed in `dtype`."""

    has_kernel = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init_std: float,
        dtype: mstype.Type = mstype.float32,
        bias: bool = True,
    ):
        super().__init__()
        self.matrix_shape = (out_features, in_features)
        self.weight = Parameter(initializer(Normal(init_std), self.matrix_shape, mstype.float32))
        self.dtype, self.has_bias = dtype, bias
        self.matmul, self.cast = ops.MatMul(transpose_b=True), ops.Cast()
        if bias:
            self.bias = Parameter(initializer("zeros", (out_features,), mstype.float32))
            self.bias_add = ops.Add()

    def construct(self, x, adapter_ids=None):  # (N, in) -> (N, out)
        if self.has_kernel and x.shape[0] <= MAX_KERNEL_ROWS:
            y = self.kernel(x, *self.operands())
        else:
            y = self.matmul(x, self.cast(self.weight, self.dtype))
            if self.has_bias:
                y = self.bias_add(y, self.cast(self.bias, self.dtype))
        return self.with_adapters(y, x, adapter_ids) if self.has_adapters else y

    def operands(self):
        """Inputs of a kernel."""
        return (self.weight, self.bias) if self.has_bias else (self.weight,)
