# SPDX-License-Identifier: Apache-2.0
"""Dropless experts: rows sorted by expert, and products of each expert with its own rows alone.

A layer computes k rows for each token however unevenly the router chooses; the number of rows of each expert is data, shapes
are static. Where experts are sharded, the ranks of an expert-parallel group gather each other's tokens, each multiplies the
rows of its own experts, and the results of each token are reduce-scattered. Shapes: see `sporeloom.nn.moe`; P parts of the
experts, m choices of a token that a part may have, R = P*N*m. Source: arXiv:2211.15841 (MegaBlocks), the all-gather
dispatcher of Megatron-LM.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate import GroupedMatmulV4

from sporeloom.core.grouped_product import SHARE_OF_ROWS, grouped_outer_product, grouped_product
from sporeloom.models.cells import GroupedProductCell
from sporeloom.models.parts.experts import choices_of_part

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


@ops.constexpr
def first_experts(parts, num_experts):
    """(P, 1, 1): the first expert of each part."""
    return Tensor((np.arange(parts) * (num_experts // parts)).astype(np.int32).reshape(parts, 1, 1))


@ops.constexpr
def zero(dtype):
    return Tensor(0, dtype)


class GroupedProduct(nn.Cell, GroupedProductCell):
    """x (R, in), sorted by expert, W (E, out, in), counts (E,) int64: rows of each expert -> (R, out). Rows after the last
    group are undefined, in the gradient, too.

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
        self.of_share(1.0)
        self.numpy_product = ops.Custom(grouped_product, lambda x, w, _: [x[0], w[1]], lambda x, *_: x, "pyfunc")
        self.numpy_back = ops.Custom(_product_back, lambda y, w, _: [y[0], w[2]], lambda y, *_: y, "pyfunc")
        self.numpy_outer = ops.Custom(
            grouped_outer_product, lambda x, y, n: [n[0], y[1], x[1]], lambda x, *_: x, "pyfunc"
        )

    def of_share(self, share):
        """Mark the operators: each rank sorts its rows, of which this share belongs to the experts that it has."""
        for operator in (self.product, self.product_back, self.outer):
            operator.add_prim_attr(SHARE_OF_ROWS, share)

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


class OwnChoices(nn.Cell):
    """For each of P parts of the experts the choices of each token that may be of its own ones.

    Experts (N, k) and weights (N, k) of choices -> numbers of experts, counted from the first one of the part, experts and
    weights, (P, N, m), with m the largest number of a token's choices that can be of a part.
    """

    def __init__(self, num_experts, chosen, is_grouped):
        super().__init__()
        self.experts, self.chosen, self.is_grouped = num_experts, chosen, is_grouped
        self.parts, self.most = 1, chosen
        self.expand, self.to_parts, self.shift, self.to_key = ops.ExpandDims(), ops.Tile(), ops.Sub(), ops.FloorMod()
        self.expand_weights, self.weights_to_parts = ops.ExpandDims(), ops.Tile()
        self.own_first, self.first, self.first_keys = ops.Sort(), ops.StridedSlice(), ops.StridedSlice()
        self.pick, self.pick_weights = ops.GatherD(), ops.GatherD()

    def split_experts(self, parts):
        """Make so many parts. Returns the share of the choices there are then that are of their own part."""
        self.parts, self.most = parts, choices_of_part(self.experts, self.chosen, parts, self.is_grouped)
        return self.chosen / (parts * self.most)

    def construct(self, choices, weights):
        parts = self.parts
        experts = self.to_parts(self.expand(choices, 0), (parts, 1, 1))  # (N, k) -> (P, N, k)
        weights = self.weights_to_parts(self.expand_weights(weights, 0), (parts, 1, 1))
        if parts == 1:
            return experts, experts, weights
        keys = self.to_key(self.shift(experts, first_experts(parts, self.experts)), self.experts)
        if self.most < self.chosen:
            size = (parts, choices.shape[0], self.most)
            keys, positions = self.own_first(keys)
            keys = self.first_keys(keys, (0, 0, 0), size, (1, 1, 1))
            positions = self.first(positions, (0, 0, 0), size, (1, 1, 1))
            experts, weights = self.pick(experts, 2, positions), self.pick_weights(weights, 2, positions)
        return keys, experts, weights


class SortedRows(nn.Cell):
    """Order of the choices by expert, for each part of the experts with the choices of its own experts in front.

    Numbers and experts of choices (P, N, m), and one-hot (G, k*L, E) -> for each sorted row the choice that it is, its token
    and its expert, whether its expert belongs to another part, and for each choice its row, all (R,); and the number of rows
    of each expert, (E,) int64. Expert parallel ranks have a part each and all tokens of their group, and each rank sorts the
    rows that it has: indices count within a rank's rows, of which those beyond the numbers are of other ranks' experts.
    """

    def __init__(self, num_experts):
        super().__init__()
        self.experts = num_experts
        self.flat, self.flat_experts = ops.Reshape(), ops.Reshape()
        self.sort, self.unsort, self.token, self.expert = ops.Sort(), ops.Sort(), ops.FloorDiv(), ops.Gather()
        self.is_away = ops.GreaterEqual()
        self.of_group, self.to_int, self.count = ops.ReduceSum(), ops.Cast(), ops.ReduceSum()

    def construct(self, keys, experts, one_hot):
        parts, _, most = keys.shape
        counts = self.count(self.to_int(self.of_group(one_hot, 1), mstype.int64), 0)
        keys, order = self.sort(self.flat(keys, (-1,)))
        _, rows = self.unsort(order)
        away = None
        if parts == 1:
            experts = keys
        else:
            away = self.is_away(keys, self.experts // parts)
            experts = self.expert(self.flat_experts(experts, (-1,)), order, 0)
        return order, self.token(order, most), experts, away, rows, counts


class RowsOfTokens(nn.Cell):
    """The row of the token of each sorted choice: (N, D), tokens (R,), rows (P, N, m) -> (R, D). The gradient of a token is
    the sum over its choices, and over the parts of the experts."""

    def __init__(self):
        super().__init__()
        self.pick, self.unpick = ops.Gather(), of_gradient(ops.Gather())
        self.sum, self.nothing, self.nothing_back = of_gradient(ops.ReduceSum()), ops.ZerosLike(), ops.ZerosLike()

    def construct(self, x, tokens, rows):
        return self.pick(x, tokens, 0)

    def bprop(self, x, tokens, rows, out, dout):
        of_choices = self.unpick(dout, rows, 0)  # (P, N, m, D)
        return self.sum(of_choices, (0, 2)), self.nothing(tokens), self.nothing_back(rows)


class SumsOfTokens(nn.Cell):
    """The transpose of `RowsOfTokens`, of weighted rows: (R, D), weights of choices, choices and tokens of rows (R,), rows
    (P, N, m) -> (N, D)."""

    def __init__(self):
        super().__init__()
        self.pick_weight, self.column, self.weigh = ops.Gather(), ops.ExpandDims(), ops.Mul()
        self.pick, self.sum = ops.Gather(), ops.ReduceSum()
        self.unpick, self.weigh_back = of_gradient(ops.Gather()), of_gradient(ops.Mul())
        self.pick_weight_back, self.column_back = of_gradient(ops.Gather()), of_gradient(ops.ExpandDims())
        self.each, self.dot = of_gradient(ops.Mul()), of_gradient(ops.ReduceSum())
        self.unpick_weight, self.flat = of_gradient(ops.Gather()), of_gradient(ops.Reshape())
        self.nothing, self.nothing_token, self.nothing_back = ops.ZerosLike(), ops.ZerosLike(), ops.ZerosLike()

    def construct(self, y, weights, order, tokens, rows):
        y = self.weigh(y, self.column(self.pick_weight(weights, order, 0), 1))
        return self.sum(self.pick(y, rows, 0), (0, 2))

    def bprop(self, y, weights, order, tokens, rows, out, dout):
        of_rows = self.unpick(dout, tokens, 0)  # (R, D)
        of_y = self.weigh_back(of_rows, self.column_back(self.pick_weight_back(weights, order, 0), 1))
        of_weights = self.flat(self.unpick_weight(self.dot(self.each(of_rows, y), 1), rows, 0), weights.shape)
        nothing = self.nothing(order), self.nothing_token(tokens), self.nothing_back(rows)
        return of_y, of_weights, *nothing


class WithoutOthersRows(nn.Cell):
    """Rows (R, D) with zeros where `away` (R,), as products of groups leave rows after the last group undefined; in the
    gradient, too."""

    def __init__(self):
        super().__init__()
        self.column, self.column_back = ops.ExpandDims(), of_gradient(ops.ExpandDims())
        self.fill, self.fill_back, self.nothing = ops.MaskedFill(), of_gradient(ops.MaskedFill()), ops.ZerosLike()

    def construct(self, x, away):
        return self.fill(x, self.column(away, 1), zero(x.dtype))

    def bprop(self, x, away, out, dout):
        return self.fill_back(dout, self.column_back(away, 1), zero(dout.dtype)), self.nothing(away)
