# SPDX-License-Identifier: Apache-2.0
"""Matrix products: a sharded contracted dim makes the output a partial sum."""

from __future__ import annotations

import itertools
from typing import Any

from sporeloom.core.grouped_product import SHARE_OF_ROWS
from sporeloom.partition.layout import NONE, ValueLayout
from sporeloom.partition.operation import Handler, Operand, Operation, Plan, UnknownValueError
from sporeloom.partition.operators.labelled import along
from sporeloom.strategy.layout import Dim

PENDING_BESIDE = "pending_beside"
"""Attribute of an operator whose output is only an item of a sum: axes over which other items are partial sums."""


def _without(dim: Dim, used: frozenset[str]) -> Dim:
    return tuple(axis for axis in dim if axis not in used)


def _agreed(x: Dim, w: Dim) -> Dim:
    """Axes that shard a dim of both operands: the common leading axes, or those of the only operand that is sharded."""
    if not x or not w:
        return x or w
    common = [a for a, b in zip(x, w, strict=False) if a == b]
    return tuple(common) if common else x


def matrix_product(op: Operation) -> Plan:
    """(.., M, K) x (.., K, N) -> (.., M, N); inputs 3 and 4 are the flags that transpose x and w."""
    x, w = op.tensor(0), op.tensor(1)
    transpose_x, transpose_w = bool(op.constant(2)), bool(op.constant(3))
    return _product(op, x, w, transpose_x, transpose_w)


def plain_product(op: Operation) -> Plan:
    """A matrix product without transposed operands."""
    return _product(op, op.tensor(0), op.tensor(1), False, False)


def _product(op: Operation, x: Operand, w: Operand, transpose_x: bool, transpose_w: bool) -> Plan:
    if len(x.shape) < 2 or len(w.shape) < 2:
        return _whole_product(op)
    shape = op.output.shape
    num_batch = len(shape) - 2
    x_m, x_k = (-1, -2) if transpose_x else (-2, -1)
    w_k, w_n = (-1, -2) if transpose_w else (-2, -1)
    keep = _kept(op, x, w)
    batch, used = _batch_dims(op, x, w, num_batch, keep)
    k = _without(_agreed(x.dims[x_k], w.dims[w_k]), used)
    if not x.dims[x_k]:  # FSDP: ranks with different rows shard the weight, so it is gathered
        k = _without(k, frozenset(x.dims[x_m]))
    (k,) = op.fit([k], (x.shape[x_k],), used)
    used |= set(k)
    m = _without(x.dims[x_m], used)
    (m,) = op.fit([m], (shape[-2],), used)
    used |= set(m)
    (n,) = op.fit([_without(w.dims[w_n], used)], (shape[-1],), used)
    wanted_x = _dims_of(x, batch, shape, {x_m: m, x_k: k})
    wanted_w = _dims_of(w, batch, shape, {w_k: k, w_n: n})
    return Plan(
        op.as_they_are({0: ValueLayout(wanted_x, x.partial & keep), 1: ValueLayout(wanted_w, w.partial & keep)}),
        (ValueLayout((*batch, m, n), frozenset(k) | keep),),
    )


def _kept(op: Operation, x: Operand, w: Operand) -> frozenset[str]:
    """Axes of one operand's partial sums that may stay pending, as a product is linear in each operand. Not if the
    product is larger than that operand, unless it is added to a partial sum over the same axes."""
    if bool(x.partial) == bool(w.partial):
        return NONE
    operand, other = (x, w) if x.partial else (w, x)
    assert operand.type is not None
    keep = operand.partial - frozenset(axis for dim in (*other.dims, *operand.dims) for axis in dim)
    if op.output.num_elements > operand.type.num_elements:
        return keep & op.attributes.get(PENDING_BESIDE, NONE)
    return keep


def _batch_dims(
    op: Operation, x: Operand, w: Operand, num_batch: int, keep: frozenset[str]
) -> tuple[tuple[Dim, ...], frozenset[str]]:
    """Axes that shard the batch dims of the product, each once, and the set of these axes and `keep`."""
    wanted: list[Dim] = []
    used = keep
    for position in range(num_batch):
        dim: Dim = ()
        for operand in (x, w):
            at = position - num_batch + len(operand.shape) - 2
            if at >= 0 and operand.shape[at] == op.output.shape[position] and not dim:
                dim = _without(operand.dims[at], used)
        wanted.append(dim)
        used |= set(dim)
    fitted = op.fit(wanted, op.output.shape[:num_batch], keep)
    return fitted, keep | frozenset(axis for dim in fitted for axis in dim)


def _dims_of(
    operand: Operand, batch: tuple[Dim, ...], shape: tuple[int, ...], matrix: dict[int, Dim]
) -> tuple[Dim, ...]:
    """Sharding of an operand: that of its batch dims where it is not broadcast, and that of its matrix dims."""
    num_dims = len(operand.shape)
    dims: list[Dim] = [()] * num_dims
    for position in range(num_dims - 2):
        at = position + len(batch) - (num_dims - 2)
        if operand.shape[position] == shape[at]:
            dims[position] = batch[at]
    for at, dim in matrix.items():
        dims[at + num_dims] = dim
    return tuple(dims)


def _whole_product(op: Operation) -> Plan:
    """A product with a vector, contracted along the last dim of x: computed unsharded, after partial sums are reduced."""
    x, w = op.tensor(0), op.tensor(1)
    return Plan(
        op.as_they_are({0: ValueLayout(((),) * len(x.shape)), 1: ValueLayout(((),) * len(w.shape))}),
        (ValueLayout(((),) * len(op.output.shape)),),
    )


def dense(op: Operation) -> Plan:
    """x w^T + bias. With a bias the contracted dim is unsharded, because every rank would add the bias to its partial
    sum."""
    bias = op.operands[2] if len(op.operands) > 2 else None
    if isinstance(bias, Operand) and bias.type is not None:
        return along(op, "* ., n ., n -> * n")
    return along(op, "* k, n k -> +k * n", (0, 1))


COUNTS, GROUP_TYPE, LIST_TYPE = 8, 13, 14
"""Inputs of GroupedMatmulV4: rows of each group, the grouped dim, and whether these are counts."""
BY_ROWS, BY_SUMMED_ROWS = 0, 2


def grouped_product(op: Operation) -> Plan:
    """Rows (R, K), sorted by group, each times the matrix of its group (E, K, N) -> (R, N); or the gradient of the matrices,
    (K, R) with (R, N) -> (E, K, N).

    Rows are sharded by axes over which the rows of each group, (E,), are a partial sum: then they are those that a rank
    has of each group. Every rank has the matrices of all groups; or, of an operator marked with `SHARE_OF_ROWS`, those of
    the groups by whose axes its rows are sharded first: then its rows begin with those of its groups.
    """
    x, w, counts = _only(op, 0), _only(op, 1), op.tensor(COUNTS)
    kind, are_counts = int(op.constant(GROUP_TYPE)), int(op.constant(LIST_TYPE)) == 1
    absent = all(op.constant(i) is None for i in (*range(2, COUNTS), *range(COUNTS + 1, COUNTS + 4)))
    if kind not in (BY_ROWS, BY_SUMMED_ROWS) or not are_counts or not absent:
        raise UnknownValueError(f"{op.kind}: another form than rows grouped by counts")
    dim = 0 if kind == BY_ROWS else 1
    groups = counts.dims[0] if op.attributes.get(SHARE_OF_ROWS) else ()
    if x.dims[dim][: len(groups)] != groups:
        groups = ()
    further = itertools.takewhile(lambda axis: axis in counts.partial, x.dims[dim][len(groups) :])
    (rows,) = op.fit([(*groups, *further)], (x.shape[dim],))
    taken = frozenset(rows)
    of_counts = ValueLayout((groups,), taken - frozenset(groups))
    (n,) = op.fit([_without(w.dims[-1], taken)], (w.shape[-1],), taken)
    inner = _agreed(x.dims[1], w.dims[1]) if kind == BY_ROWS else x.dims[0]
    taken |= set(n)
    (k,) = op.fit([_without(inner, taken)], (w.shape[1] if kind == BY_ROWS else x.shape[0],), taken)
    if kind == BY_ROWS:
        of_x, of_w, output = ValueLayout((rows, k)), ValueLayout((groups, k, n)), ValueLayout((rows, n), frozenset(k))
    else:
        of_x, of_w, output = (
            ValueLayout((k, rows)),
            ValueLayout((rows, n)),
            ValueLayout((groups, k, n), of_counts.partial),
        )
    wanted: list[Any] = list(op.as_they_are({COUNTS: of_counts}))
    wanted[:2] = (of_x,), (of_w,)
    return Plan(tuple(wanted), (output,))


def _only(op: Operation, index: int) -> Operand:
    """The one tensor of an input that is a tuple."""
    operands = op.operands[index]
    if isinstance(operands, Operand):
        return operands
    if len(operands) != 1:
        raise UnknownValueError(f"{op.kind}: several tensors in input {index + 1}")
    return operands[0]


HANDLERS: dict[str, Handler] = {
    "MatMul": matrix_product,
    "BatchMatMul": matrix_product,
    "MatMulExt": plain_product,
    "BatchMatMulExt": plain_product,
    "Dense": dense,
    "GroupedMatmulV4": grouped_product,
}
