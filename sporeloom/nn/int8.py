# SPDX-License-Identifier: Apache-2.0
"""Parts whose matrices are int8, one scale for each output channel; computed in the model's dtype after a cast."""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from sporeloom.nn.embedding import Embedding
from sporeloom.nn.head import Head, TiedHead
from sporeloom.nn.linear import MAX_KERNEL_ROWS, Linear
from sporeloom.nn.moe import ExpertLinear
from sporeloom.nn.multi_lora import AdaptedProduct


def _int8(shape):
    return Parameter(initializer("zeros", shape, mstype.int8), requires_grad=False)


def _scale(shape):
    return Parameter(initializer("ones", shape, mstype.float32), requires_grad=False)


class Int8Linear(AdaptedProduct):
    """y = (x W^T) * scale + b, with W (out, in) in int8, scale (out,)."""

    def __init__(self, linear: Linear):
        super().__init__()
        self.matrix_shape = tuple(linear.weight.shape)
        self.weight, self.scale = _int8(self.matrix_shape), _scale(self.matrix_shape[:1])
        self.dtype, self.has_bias = linear.dtype, linear.has_bias
        self.matmul, self.rescale, self.cast = ops.MatMul(transpose_b=True), ops.Mul(), ops.Cast()
        if self.has_bias:
            self.bias, self.bias_add = linear.bias, ops.Add()

    def construct(self, x, adapter_ids=None):  # (N, in) -> (N, out)
        if self.has_kernel and x.shape[0] <= MAX_KERNEL_ROWS:
            y = self.kernel(x, *self.operands())
        else:
            y = self.rescale(self.matmul(x, self.cast(self.weight, self.dtype)), self.cast(self.scale, self.dtype))
            if self.has_bias:
                y = self.bias_add(y, self.cast(self.bias, self.dtype))
        return self.with_adapters(y, x, adapter_ids) if self.has_adapters else y

    def operands(self):
        return (self.weight, self.scale, self.bias) if self.has_bias else (self.weight, self.scale)


class Int8ExpertLinear(nn.Cell):
    """y = (x W^T) * scale + b for each expert, with W (E, out, in) in int8, scale (E, 1, out)."""

    def __init__(self, linear: ExpertLinear):
        super().__init__()
        experts, out, _ = linear.weight.shape
        self.weight, self.scale = _int8(linear.weight.shape), _scale((experts, 1, out))
        self.dtype, self.has_bias = linear.dtype, linear.has_bias
        self.matmul, self.rescale, self.cast = ops.BatchMatMul(transpose_b=True), ops.Mul(), ops.Cast()
        if self.has_bias:
            self.bias, self.bias_add = linear.bias, ops.Add()

    def construct(self, x):  # (E, R, in) -> (E, R, out)
        y = self.rescale(self.matmul(x, self.cast(self.weight, self.dtype)), self.cast(self.scale, self.dtype))
        return self.bias_add(y, self.cast(self.bias, self.dtype)) if self.has_bias else y

    def operands(self):
        return (self.weight, self.scale, self.bias) if self.has_bias else (self.weight, self.scale)


class Int8Embedding(nn.Cell):
    """Rows of an int8 table, each with its scale (rows, 1), looked up by id."""

    def __init__(self, embedding: Embedding):
        super().__init__()
        num_rows = embedding.weight.shape[0]
        self.weight, self.scale = _int8(embedding.weight.shape), _scale((num_rows, 1))
        self.gather, self.gather_scale, self.rescale = ops.Gather(), ops.Gather(), ops.Mul()
        self.cast = ops.Cast()

    def construct(self, ids):  # (N,) -> (N, D)
        rows, scales = self.gather(self.weight, ids, 0), self.gather_scale(self.scale, ids, 0)
        return self.rescale(self.cast(rows, mstype.float32), scales)


class Int8TiedHead(TiedHead):
    """Logits with an int8 embedding and its scales."""

    def __init__(self, head: TiedHead, word: Int8Embedding):
        super().__init__(head.config, head.dtype)
        self.word_scale = word.scale
        self.rescale, self.reshape = ops.Mul(), ops.Reshape()

    def construct(self, x, word_table, rows=None):  # (B*T, D), (V, D) -> (B*T or len(rows), V) float32
        if rows is not None:
            x = self.pick(x, rows, 0)
        if self.has_kernel and x.shape[0] <= MAX_KERNEL_ROWS:
            return self.scaled(self.kernel(x, word_table, self.word_scale))
        logits = self.cast(self.matmul(x, self.cast(word_table, self.dtype)), mstype.float32)
        scales = self.reshape(self.word_scale, (1, -1))  # (V, 1) -> (1, V)
        return self.scaled(self.rescale(logits, scales))


class Int8Head(TiedHead):
    """Logits with an int8 matrix of its own."""

    def __init__(self, head: Head):
        super().__init__(head.config, head.dtype)
        self.weight, self.scale = _int8(head.weight.shape), _scale((1, head.weight.shape[0]))
        self.rescale = ops.Mul()

    def construct(self, x, word_table, rows=None):  # (B*T, D), unused -> (B*T or len(rows), V) float32
        if rows is not None:
            x = self.pick(x, rows, 0)
        if self.has_kernel and x.shape[0] <= MAX_KERNEL_ROWS:
            return self.scaled(self.kernel(x, self.weight, self.scale))
        logits = self.cast(self.matmul(x, self.cast(self.weight, self.dtype)), mstype.float32)
        return self.scaled(self.rescale(logits, self.scale))
