# SPDX-License-Identifier: Apache-2.0
"""Losses over many elements, with the reductions none, sum and mean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sporeloom.partition.graph import Input, Name, TensorType
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.operation import Emitter, Handler, Operand, Operation, Plan, Rewrite, UnknownValueError
from sporeloom.partition.operators.elementwise import broadcast_dims
from sporeloom.partition.operators.labelled import along

SUM, MEAN, NONE = 0, 1, 2
"""MindSpore's codes of reductions; as attributes they are words."""
WORDS = {"sum": SUM, "mean": MEAN, "none": NONE}


def _reduction(op: Operation, index: int | None) -> int:
    given = op.attributes.get("reduction") if index is None else op.constant(index)
    number = WORDS.get(given, given) if isinstance(given, str) else given
    if number not in (SUM, MEAN, NONE):
        raise UnknownValueError(f"{op.kind}: reduction {given}")
    return int(number)


def loss(op: Operation, reduction: int | None, x: int = 0) -> Plan:
    """A loss of input `x`, whose sharding the other inputs follow. `reduction` is the index of the input with the kind
    of reduction; None if it is an attribute."""
    how, given = _reduction(op, reduction), op.tensor(x)
    over = frozenset(axis for dim in given.dims for axis in dim)
    wanted = _like(op, given.dims, given.shape)
    if how == NONE:
        return Plan(wanted, (ValueLayout(given.dims),))
    output = ValueLayout(((),) * len(op.output.shape), over)
    return Plan(wanted, (output,), rewrite=_scaled(op, [output], how, over))


def loss_gradient(op: Operation, reduction: int | None, x: int = 0) -> Plan:
    """Gradient of a loss with respect to input `x`. The gradient of a mean is divided by the global number of elements."""
    how, given = _reduction(op, reduction), op.tensor(x)
    over = frozenset(axis for dim in given.dims for axis in dim)
    output = ValueLayout(given.dims)
    return Plan(_like(op, given.dims, given.shape), (output,), rewrite=_scaled(op, [output], how, over))


def _like(op: Operation, dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...]) -> tuple[ValueLayout | None, ...]:
    """Layouts of all inputs: the given sharding, restricted to the dims that each input has."""
    return tuple(
        ValueLayout(broadcast_dims(dims, o.shape, shape)) if isinstance(o, Operand) and o.type is not None else None
        for o in op.operands
    )


def _scaled(op: Operation, outputs: Sequence[ValueLayout], how: int, over: frozenset[str]) -> Rewrite | None:
    """A rewrite that turns each rank's mean over local elements into its share of the global mean; None if not needed."""
    if how != MEAN or not over:
        return None
    locals_ = [
        TensorType(layout.local_shape(type.shape, op.grid), type.dtype)
        for layout, type in zip(outputs, op.types, strict=True)
        if type is not None
    ]
    return partial(_divided, locals_, 1.0 / op.grid.degree(over))


def _divided(locals_: Sequence[TensorType], factor: float, emit: Emitter, inputs: Sequence[Input]) -> Sequence[Name]:
    (found,) = emit.operator(inputs, locals_)
    (local,) = locals_
    return emit.node("Mul", [found, emit.constant(factor, TensorType((), local.dtype))], [local])


def sparse_cross_entropy(op: Operation) -> Plan:
    """Cross-entropy of logits (rows, classes) against class ids (rows), averaged over rows; or its gradient."""
    plan = along(op, "n ., n -> n ." if op.attributes.get("is_grad") else "n ., n -> +n")
    logits, (output,) = plan.inputs[0], plan.outputs
    assert isinstance(logits, ValueLayout) and output is not None
    return Plan(plan.inputs, plan.outputs, rewrite=_scaled(op, [output], MEAN, frozenset(logits.dims[0])))


HANDLERS: dict[str, Handler] = {
    "BinaryCrossEntropy": partial(loss, reduction=3),
    "BinaryCrossEntropyGrad": partial(loss_gradient, reduction=4),
    "BCEWithLogitsLoss": partial(loss, reduction=4),
    "BinaryCrossEntropyWithLogitsBackward": partial(loss_gradient, reduction=5, x=1),
    "SmoothL1Loss": partial(loss, reduction=3),
    "SmoothL1LossGrad": partial(loss_gradient, reduction=4),
    "MSELossExt": partial(loss, reduction=2),
    "KLDivLoss": partial(loss, reduction=None),
    "KLDivLossGrad": partial(loss_gradient, reduction=None, x=1),
    "SparseSoftmaxCrossEntropyWithLogits": sparse_cross_entropy,
    "SoftmaxCrossEntropyWithLogits": partial(along, line="n ., n . -> n, n ."),
}
