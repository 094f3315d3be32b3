# SPDX-License-Identifier: Apache-2.0
"""Matrix product, with a bias or without."""

from mindspore import dtype as mstype
from mindspore import ops

from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.multi_lora import AdaptedProduct
from sporeloom.nn.parameter import declared_parameter

MAX_KERNEL_ROWS = 256
"""Maximum number of rows for a compiled kernel, where there is one (`sporeloom.inference.kernels`)."""


class Linear(AdaptedProduct):
    """y = x W^T + b, with W (out, in) and b (out,) in float32, computed in `dtype`."""

    def __init__(self, specs: ParameterSpecs, dtype: mstype.Type = mstype.float32):
        super().__init__()
        self.matrix_shape = specs["weight"].shape
        self.weight = declared_parameter(specs["weight"])
        self.dtype, self.has_bias = dtype, "bias" in specs
        self.matmul, self.cast = ops.MatMul(transpose_b=True), ops.Cast()
        if self.has_bias:
            self.bias = declared_parameter(specs["bias"])
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
