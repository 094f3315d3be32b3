# SPDX-License-Identifier: Apache-2.0
"""Linear parts that compute with int8 weights and int8 activations: a scale for each output channel, and one for each
token's row, taken from the row itself. Sums of products are exact, as in int32."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.weight_formats import MAX_COLUMNS_OF_DIGITS
from sporeloom.nn.int8 import Int8ExpertLinear, Int8Linear
from sporeloom.nn.linear import MAX_KERNEL_ROWS, Linear
from sporeloom.nn.moe import ExpertLinear
from sporeloom.nn.vector_quantizer import VectorQuantizer


@ops.constexpr
def _factors(steps):
    return Tensor(np.asarray(steps, np.float32)[:, None])


class Digits(nn.Cell):
    """Whole numbers up to 127 as the fewest digits whose products with int8 a float32 sums up exactly over `columns`.

    Products of whole numbers in float32 are there on every device, those of int8 are not. Digits of a row become rows.
    """

    def __init__(self, columns: int):
        super().__init__()
        count = next(count for count, limit in MAX_COLUMNS_OF_DIGITS.items() if columns <= limit)
        self.steps = tuple(2 ** (8 // count * power) for power in reversed(range(count)))
        self.divide, self.round, self.back, self.minus = ops.Div(), ops.Rint(), ops.Mul(), ops.Sub()
        self.stack, self.as_rows, self.by_digit = ops.Stack(-2), ops.Reshape(), ops.Reshape()
        self.weigh, self.add_up = ops.Mul(), ops.ReduceSum()

    def construct(self, q):  # (..., R, in) -> (..., R * digits, in)
        if len(self.steps) == 1:
            return q
        digits = ()
        for step in self.steps[:-1]:
            digit = self.round(self.divide(q, float(step)))
            digits += (digit,)
            q = self.minus(q, self.back(digit, float(step)))
        shape = q.shape
        return self.as_rows(self.stack((*digits, q)), (*shape[:-2], shape[-2] * len(self.steps), shape[-1]))

    def joined(self, sums):
        """Add up the digits' sums (..., R * digits, out) by their weights: (..., R, out)."""
        count, shape = len(self.steps), sums.shape
        if count == 1:
            return sums
        sums = self.by_digit(sums, (*shape[:-2], shape[-2] // count, count, shape[-1]))
        return self.add_up(self.weigh(sums, _factors(self.steps)), -2)


class QuantizedProduct:
    """A Cell's product of rows, each as int8 with its scale, and its int8 matrix."""

    weight: Parameter
    scale: Parameter
    dtype: mstype.Type
    matmul: ops.Primitive
    rescale: ops.Mul
    cast: ops.Cast

    def quantize_rows(self, columns: int) -> None:
        self.activations, self.digits = VectorQuantizer(), Digits(columns)
        self.rescale_rows, self.narrow = ops.Mul(), ops.Cast()

    def product(self, x):
        q, of_rows = self.activations.rounded(x)
        sums = self.digits.joined(self.matmul(self.digits(q), self.cast(self.weight, mstype.float32)))
        return self.narrow(self.rescale(self.rescale_rows(sums, of_rows), self.scale), self.dtype)


class W8A8Linear(Int8Linear, QuantizedProduct):
    """y = (q W^T) * scale of the row * scale of the column + b, with x = q * scale of the row, and q and W in int8."""

    def __init__(self, linear: Linear):
        super().__init__(linear)
        self.quantize_rows(self.matrix_shape[-1])

    def construct(self, x, adapter_ids=None):  # (N, in) -> (N, out)
        if self.has_kernel and x.shape[0] <= MAX_KERNEL_ROWS:
            y = self.kernel(x, *self.operands())
        else:
            y = self.product(x)
            if self.has_bias:
                y = self.bias_add(y, self.cast(self.bias, self.dtype))
        return self.with_adapters(y, x, adapter_ids) if self.has_adapters else y


class W8A8ExpertLinear(Int8ExpertLinear, QuantizedProduct):
    """The same for each expert, with W (E, out, in) in int8, scale of the columns (E, 1, out)."""

    def __init__(self, linear: ExpertLinear):
        super().__init__(linear)
        self.quantize_rows(linear.weight.shape[-1])

    def construct(self, x):  # (E, R, in) -> (E, R, out)
        y = self.product(x)
        return self.bias_add(y, self.cast(self.bias, self.dtype)) if self.has_bias else y
