# SPDX-License-Identifier: Apache-2.0
"""Dropless experts: rows sorted by expert, and products of each expert with its own rows alone.

A layer computes k rows for each token however unevenly the router chooses; the number of rows of each expert is data, shapes
are static. Shapes: see `sporeloom.nn.moe`; R = G*k*L. Source: arXiv:2211.15841 (MegaBlocks).
"""

import mindspore as ms
from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.ops.auto_generate import GroupedMatmulV4

from sporeloom.core.grouped_product import grouped_outer_product, grouped_product
from sporeloom.models.cells import GroupedProductCell

ONE_TENSOR, BY_ROWS, BY_SUMMED_ROWS, COUNTS = 3, 0, 2, 1
"""Settings of GroupedMatmulV4: split_item (one result), group_type (groups of rows; of the rows that are summed, for the
gradient of weights), group_list_type (groups given by their lengths)."""

FEW_TOKENS = 32
"""Number of tokens up to which NumPy's grouped product is slower (benchmarks/results/moe.md)."""


def of_gradient(operator):
    """Mark an operator of a `bprop`, which MindSpore does not distinguish from those of the forward pass."""
    return operator.add_prim_attr("is_backward", True)


@ops.constexpr
def has_fast_product(has_operator, num_tokens):
    """Whether there is a fast product of groups: not on GPUs, nor for few tokens on one CPU device, where NumPy gets a copy
    of all matrices. There each expert has capacity for all tokens."""
    target = ms.get_context("device_target")
    is_slow = target == "CPU" and not has_operator and num_tokens <= FEW_TOKENS
    return target != "GPU" and not is_slow


@ops.constexpr
def has_operator(on_cpu):
    """Whether the graph that is being compiled has GroupedMatmulV4: on Ascend, and `on_cpu` on CPUs."""
    target = ms.get_context("device_target")
    return target == "Ascend" or (on_cpu and target == "CPU")


class GroupedProduct(nn.Cell, GroupedProductCell):
    """x (R, in), sorted by expert, W (E, out, in), counts (E,) int64: rows of each expert -> (R, out).

    On one CPU device, which has no operator for it, NumPy computes it.
    """

    def __init__(self):
        super().__init__()
        self.transpose, self.transpose_rows, self.nothing = (
            ops.Transpose(),
            of_gradient(ops.Transpose()),
            ops.ZerosLike(),
        )
        self.product = GroupedMatmulV4()
        self.product_back, self.outer = of_gradient(GroupedMatmulV4()), of_gradient(GroupedMatmulV4())
        self.numpy_product = ops.Custom(grouped_product, lambda x, w, _: [x[0], w[1]], lambda x, *_: x, "pyfunc")
        self.numpy_back = ops.Custom(_product_back, lambda y, w, _: [y[0], w[2]], lambda y, *_: y, "pyfunc")
        self.numpy_outer = ops.Custom(
            grouped_outer_product, lambda x, y, n: [n[0], y[1], x[1]], lambda x, *_: x, "pyfunc"
        )

    def construct(self, x, weight, counts):
        if not has_operator(self.operator_on_cpu):
            return self.numpy_product(x, weight, counts)
        return self.by_operator(self.product, x, self.transpose(weight, (0, 2, 1)), counts, BY_ROWS)

    def bprop(self, x, weight, counts, out, dout):
        if not has_operator(self.operator_on_cpu):
            of_x, of_weight = self.numpy_back(dout, weight, counts), self.numpy_outer(x, dout, counts)
        else:
            of_x = self.by_operator(self.product_back, dout, weight, counts, BY_ROWS)
            of_weight = self.by_operator(self.outer, self.transpose_rows(dout, (1, 0)), x, counts, BY_SUMMED_ROWS)
        return of_x, of_weight, self.nothing(counts)

    def by_operator(self, product, x, y, counts, group_type):
        settings = (None, None, None, ONE_TENSOR, group_type, COUNTS, 0, None)
        return product((x,), (y,), None, None, None, None, None, None, counts, *settings)[0]


def _product_back(y, weight, counts):
    return grouped_product(y, weight.swapaxes(1, 2), counts)


class OfRows(nn.Cell):
    """Values of the expert of each row, (E, 1, out) -> (R, out), in `dtype`."""

    def __init__(self):
        super().__init__()
        self.cast, self.shape, self.pick = ops.Cast(), ops.Reshape(), ops.Gather()

    def construct(self, value, experts, dtype):
        count, _, width = value.shape
        return self.pick(self.shape(self.cast(value, dtype), (count, width)), experts, 0)


class SortedRows(nn.Cell):
    """Order of the choices by expert.

    Experts of choices (G, k*L) and their one-hot (G, k*L, E) -> the choice in each sorted row, the row of each choice and
    the expert of each row, all (R,); and the number of rows of each expert, (E,) int64. Under a mesh each rank sorts the
    rows of its groups, so numbers of rows count within a rank's.
    """

    def __init__(self):
        super().__init__()
        self.flat, self.sort, self.unsort = ops.Reshape(), ops.Sort(), ops.Sort()
        self.of_group, self.to_int, self.count = ops.ReduceSum(), ops.Cast(), ops.ReduceSum()

    def construct(self, chosen, one_hot):
        experts, order = self.sort(self.flat(chosen, (-1,)))
        _, rows = self.unsort(order)
        return order, rows, experts, self.count(self.to_int(self.of_group(one_hot, 1), mstype.int64), 0)


class Permute(nn.Cell):
    """Rows (R, D) in the order (R,), whose inverse is `back`: with it the gradient is as cheap as the result."""

    def __init__(self):
        super().__init__()
        self.pick, self.unpick = ops.Gather(), of_gradient(ops.Gather())
        self.nothing, self.nothing_back = ops.ZerosLike(), ops.ZerosLike()

    def construct(self, x, order, back):
        return self.pick(x, order, 0)

    def bprop(self, x, order, back, out, dout):
        return self.unpick(dout, back, 0), self.nothing(order), self.nothing_back(back)
