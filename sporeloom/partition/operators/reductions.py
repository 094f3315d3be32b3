# SPDX-License-Identifier: Apache-2.0
"""Reductions: a sum over a sharded dim is a partial sum, a maximum is all-reduced at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sporeloom.partition.graph import Input, Name, TensorType
from sporeloom.partition.layout import NONE, ValueLayout
from sporeloom.partition.operation import Emitter, Handler, Operand, Operation, Plan

NONE_OF_THEM: frozenset[int] = frozenset()


def reduced_dims(op: Operation, index: int = 1) -> frozenset[int]:
    """The dims of the first input that are reduced, from the input at `index`: None or an empty tuple means all dims."""
    return _named(op, op.constant(index) if index < len(op.operands) else None)


def _named(op: Operation, given: Any) -> frozenset[int]:
    num_dims = len(op.tensor(0).shape)
    if given is None or given == () or given == []:
        return frozenset(range(num_dims))
    dims = given if isinstance(given, tuple | list) else (given,)
    return frozenset(int(dim) % max(num_dims, 1) for dim in dims)


def _output_dims(op: Operation, dims: frozenset[int], layout: ValueLayout) -> tuple[tuple[str, ...], ...]:
    keeps_dims = len(op.output.shape) == len(op.tensor(0).shape)
    return tuple(() if dim in dims else axes for dim, axes in enumerate(layout.dims) if keeps_dims or dim not in dims)


def sum_over(op: Operation) -> Plan:
    """A sum: partial over the axes of the reduced dims and of the input. ReduceSum's fourth input, if true, makes empty
    dims mean no dims instead of all."""
    x, dims = op.tensor(0), reduced_dims(op)
    if op.kind == "ReduceSum" and len(op.operands) > 3 and op.constant(3) and not op.constant(1):
        dims = NONE_OF_THEM
    assert x.layout is not None
    pending = x.partial | {axis for dim in dims for axis in x.dims[dim]}
    return Plan(op.as_they_are({0: x.layout}), (ValueLayout(_output_dims(op, dims, x.layout), pending),))


def mean_over(op: Operation) -> Plan:
    """A mean: a partial sum of each rank's local mean, divided by the number of ranks; all shards have equal size."""
    x, dims = op.tensor(0), reduced_dims(op)
    assert x.layout is not None
    over = frozenset(axis for dim in dims for axis in x.dims[dim])
    output = ValueLayout(_output_dims(op, dims, x.layout), x.partial | over)
    local = TensorType(output.local_shape(op.output.shape, op.grid), op.output.dtype)
    rewrite = partial(_scaled_mean, local, 1.0 / op.grid.degree(over)) if over else None
    return Plan(op.as_they_are({0: x.layout}), (output,), rewrite=rewrite)


def _scaled_mean(local: TensorType, factor: float, emit: Emitter, inputs: Sequence[Input]) -> Sequence[Name]:
    (mean,) = emit.operator(inputs, [local])
    return emit.node("Mul", [mean, emit.constant(factor, TensorType((), local.dtype))], [local])


def extreme_over(op: Operation, reduction: str) -> Plan:
    """A maximum, minimum or product: reduced locally, then all-reduced."""
    x, dims = op.tensor(0), reduced_dims(op)
    layout = ValueLayout(x.dims)
    over = op.grid.in_order(axis for dim in dims for axis in x.dims[dim])
    output = ValueLayout(_output_dims(op, dims, layout))
    local = TensorType(output.local_shape(op.output.shape, op.grid), op.output.dtype)
    rewrite = partial(extreme_of_all, local, over, reduction) if over else None
    return Plan(op.as_they_are({0: layout}), (output,), rewrite=rewrite)


def extreme_of_all(
    local: TensorType, axes: tuple[str, ...], reduction: str, emit: Emitter, inputs: Sequence[Input]
) -> Sequence[Name]:
    """All-reduce the results of the ranks' local reductions."""
    (own,) = emit.operator(inputs, [local])
    return emit.node("AllReduce", [own], [local], {"axes": axes, "op": reduction})


def any_or_all(op: Operation) -> Plan:
    """A logical reduction: its dims are gathered, because truth values have no all-reduce."""
    x, dims = op.tensor(0), reduced_dims(op)
    layout = ValueLayout(tuple(() if dim in dims else axes for dim, axes in enumerate(x.dims)))
    return Plan(op.as_they_are({0: layout}), (ValueLayout(_output_dims(op, dims, layout)),))


def along_dim(op: Operation, index: int = 1) -> Plan:
    """An operator such as a cumulative sum: its outputs have the shape of its input and the given dims are gathered.
    Partial sums are reduced first."""
    return _whole_along(op, reduced_dims(op, index))


def along_attribute(op: Operation) -> Plan:
    """`along_dim` with the dims in an attribute."""
    return _whole_along(op, _named(op, op.attributes.get("axis")))


def _whole_along(op: Operation, dims: frozenset[int]) -> Plan:
    x = op.tensor(0)
    layout = ValueLayout(tuple(() if dim in dims else axes for dim, axes in enumerate(x.dims)))
    outputs = tuple(layout if type is not None else None for type in op.types)
    tensors = {i: layout for i, o in enumerate(op.operands) if isinstance(o, Operand) and o.type and o.shape == x.shape}
    return Plan(op.as_they_are(tensors), outputs)


def picked_along_dim(op: Operation, index: int = 1) -> Plan:
    """An operator that removes one dim by position, not by value: argmax, or the maximum with its index."""
    return _taken_away(op, reduced_dims(op, index))


def norm_over_attribute(op: Operation) -> Plan:
    """A norm over the dims in an attribute, which are gathered."""
    return _taken_away(op, _named(op, op.attributes.get("axis")))


def _taken_away(op: Operation, dims: frozenset[int]) -> Plan:
    x = op.tensor(0)
    layout = ValueLayout(tuple(() if dim in dims else axes for dim, axes in enumerate(x.dims)))
    output = ValueLayout(_output_dims(op, dims, layout))
    return Plan(op.as_they_are({0: layout}), tuple(output for _ in op.types))


def squares_summed(op: Operation) -> Plan:
    """L2 loss, one number for all elements: a partial sum over every sharding axis."""
    x = op.tensor(0)
    layout = ValueLayout(x.dims)
    return Plan(op.as_they_are({0: layout}), (ValueLayout(((),) * len(op.output.shape), layout.axes or NONE),))


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("ReduceSum", "SumExt"), sum_over),
    **dict.fromkeys(("ReduceMean", "MeanExt"), mean_over),
    **dict.fromkeys(("ReduceMax", "AmaxExt", "Max"), partial(extreme_over, reduction="max")),
    **dict.fromkeys(("ReduceMin", "AminExt", "Min"), partial(extreme_over, reduction="min")),
    **dict.fromkeys(("ReduceProd", "ProdExt"), partial(extreme_over, reduction="prod")),
    **dict.fromkeys(("ReduceAll", "ReduceAny"), any_or_all),
    **dict.fromkeys(("CumSum", "CumsumExt", "CumProd", "Cummax", "Cummin", "CumulativeLogsumexp"), along_dim),
    **dict.fromkeys(("L2Normalize", "L2NormalizeGrad"), along_attribute),
    "LpNorm": norm_over_attribute,
    "L2Loss": squares_summed,
}
