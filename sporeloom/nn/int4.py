# SPDX-License-Identifier: Apache-2.0
"""Parts whose matrices are int4 in groups of columns, each with a scale and maybe a zero point; computed in the model's
dtype after dequantization.

Columns lie in blocks of 32, of 16 bytes: byte i has column i in its low half and column 16 + i in its high half
(`sporeloom.models.weight_formats.BLOCK`).
"""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from sporeloom.models.weight_formats import BLOCK, WeightFormat
from sporeloom.nn.linear import MAX_KERNEL_ROWS, Linear
from sporeloom.nn.moe import ExpertLinear
from sporeloom.nn.multi_lora import AdaptedProduct

SYMMETRIC_ZERO = 8
"""Zero point of groups that have none of their own."""


@ops.constexpr
def _divisors():
    """(2, 1): what divides a byte, for its low and its high half."""
    return Tensor(np.asarray([[1.0], [16.0]], np.float32))


def _parameters(shape, weights: WeightFormat):
    """Bytes, scales and zero points of a matrix of `shape` (..., out, in)."""
    *outer, columns = shape
    groups = (*outer, weights.groups(columns))
    packed = Parameter(initializer("zeros", (*outer, columns // BLOCK, BLOCK // 2), mstype.uint8), requires_grad=False)
    scale = Parameter(initializer("ones", groups, mstype.float32), requires_grad=False)
    zero = Parameter(initializer("zeros", groups, mstype.uint8), requires_grad=False) if weights.has_zeros else None
    return packed, scale, zero


class Dequantize(nn.Cell):
    """w = (q - zero) * scale, of float32 throughout: bytes (..., out, in/32, 16), scale and zero (..., out, groups, 1)
    -> (..., out, in)."""

    def __init__(self, shape):
        super().__init__()
        self.shape = tuple(shape)
        self.expand, self.divide, self.half = ops.ExpandDims(), ops.FloorDiv(), ops.FloorMod()
        self.minus_zero, self.rescale = ops.Sub(), ops.Mul()
        self.by_group, self.flat = ops.Reshape(), ops.Reshape()

    def construct(self, packed, scale, zero=None):
        q = self.expand(packed, -2)  # (..., out, in/32, 1, 16)
        q = self.half(self.divide(q, _divisors()), 16.0)  # (..., out, in/32, 2, 16)
        groups = scale.shape[-2]
        q = self.by_group(q, (*self.shape[:-1], groups, self.shape[-1] // groups))
        q = self.minus_zero(q, float(SYMMETRIC_ZERO) if zero is None else zero)
        return self.flat(self.rescale(q, scale), self.shape)


class Int4Matrix:
    """The matrix (..., out, in) of a Cell in int4: its bytes, scales (..., out, groups), and zero points likewise where it
    has them. Rules shard these by the operators that read them."""

    bias: Parameter
    has_bias: bool

    def hold(self, shape, weights: WeightFormat):
        self.weight, self.scale, zero = _parameters(shape, weights)
        self.weight_cast, self.scale_expand, self.dequantize = ops.Cast(), ops.ExpandDims(), Dequantize(shape)
        self.has_zeros = weights.has_zeros
        if self.has_zeros:
            self.zero, self.zero_expand, self.zero_cast = zero, ops.ExpandDims(), ops.Cast()

    def matrix(self):
        packed, scale = self.weight_cast(self.weight, mstype.float32), self.scale_expand(self.scale, -1)
        if not self.has_zeros:
            return self.dequantize(packed, scale)
        return self.dequantize(packed, scale, self.zero_cast(self.zero_expand(self.zero, -1), mstype.float32))

    def operands(self):
        """Inputs of a kernel."""
        found = (self.weight, self.scale, self.zero) if self.has_zeros else (self.weight, self.scale)
        return (*found, self.bias) if self.has_bias else found


class Int4Linear(AdaptedProduct, Int4Matrix):
    """y = x W^T + b, with W (out, in)."""

    has_kernel = False

    def __init__(self, linear: Linear, weights: WeightFormat):
        super().__init__()
        self.matrix_shape = tuple(linear.weight.shape)
        self.hold(self.matrix_shape, weights)
        self.dtype, self.has_bias = linear.dtype, linear.has_bias
        self.matmul, self.cast = ops.MatMul(transpose_b=True), ops.Cast()
        if self.has_bias:
            self.bias, self.bias_add = linear.bias, ops.Add()

    def construct(self, x, adapter_ids=None):  # (N, in) -> (N, out)
        if self.has_kernel and x.shape[0] <= MAX_KERNEL_ROWS:
            y = self.kernel(x, *self.operands())
        else:
            y = self.matmul(x, self.cast(self.matrix(), self.dtype))
            if self.has_bias:
                y = self.bias_add(y, self.cast(self.bias, self.dtype))
        return self.with_adapters(y, x, adapter_ids) if self.has_adapters else y


class Int4ExpertLinear(nn.Cell, Int4Matrix):
    """y = x W^T + b for each expert, with W (E, out, in)."""

    def __init__(self, linear: ExpertLinear, weights: WeightFormat):
        super().__init__()
        self.hold(linear.weight.shape, weights)
        self.dtype, self.has_bias = linear.dtype, linear.has_bias
        self.matmul, self.cast = ops.BatchMatMul(transpose_b=True), ops.Cast()
        if self.has_bias:
            self.bias, self.bias_add = linear.bias, ops.Add()

    def construct(self, x):  # (E, R, in) -> (E, R, out)
        y = self.matmul(x, self.cast(self.matrix(), self.dtype))
        return self.bias_add(y, self.cast(self.bias, self.dtype)) if self.has_bias else y
