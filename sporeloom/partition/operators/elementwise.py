# SPDX-License-Identifier: Apache-2.0
"""Element-wise operators: outputs depend only on inputs at the same position, with NumPy's broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sporeloom.partition.layout import NONE, ValueLayout
from sporeloom.partition.operation import Handler, Operand, Operation, Plan
from sporeloom.strategy.layout import Dim, Layout, Shape

UNARY = (
    *("Abs", "ACos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh", "Tan", "Tanh"),
    *("Ceil", "Floor", "Round", "Rint", "Trunc", "Sign", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Log", "Log1p"),
    *("Square", "Sqrt", "Rsqrt", "Reciprocal", "Inv", "IsFinite", "IsNan", "IsInf", "LogicalNot", "BitwiseNot"),
    *("ReLU", "ReLU6", "ReLUV3", "Elu", "EluExt", "CeLU", "SeLU", "SeLUExt", "LeakyReLU", "LeakyReLUExt", "Mish"),
    *("GeLU", "FastGeLU", "GeluExt", "SiLU", "Sigmoid", "LogSigmoid", "Softplus", "SoftplusExt", "Softsign"),
    *(
        "HSigmoid",
        "HSwish",
        "HShrink",
        "SoftShrink",
        "OnesLike",
        "ZerosLike",
        "ZerosLikeExt",
        "ClampScalar",
        "NanToNum",
    ),
    *("PowTensorScalar", "AddScalar", "SubScalar", "Identity", "EqScalar", "NotEqualScalar", "GreaterScalar"),
    *("GreaterEqualScalar", "LessScalar", "LessEqualScalar"),
)
KEEPS_SUMS = "keeps_sums"
"""Attribute of a cast that may keep its input's partial sum pending in its output."""
NARROW = ("bfloat16", "float16")
BINARY = (
    *("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "LogicalXor"),
    *("Maximum", "Minimum", "Pow", "FloorDiv", "FloorMod", "Mod", "TruncateDiv", "TruncateMod", "Atan2", "Xdivy"),
    *("Xlogy", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "SquaredDifference", "Hypot", "DivNoNan", "Remainder"),
    *("Select", "ClampTensor", "Lerp", "LerpScalar", "Addcmul", "Addcdiv", "DivMod", "DivMods"),
    *("BitwiseAndTensor", "BitwiseOrTensor", "BitwiseXorTensor"),
)
GRADIENTS = (
    *("AbsGrad", "ACosGrad", "AcoshGrad", "AsinGrad", "AsinhGrad", "AtanGrad", "EluGrad", "EluGradExt", "ReluGrad"),
    *("ReLU6Grad", "FastGeLUGrad", "GeLUGrad", "GeluGradExt", "SiLUGrad", "SigmoidGrad", "TanhGrad", "SqrtGrad"),
    *("RsqrtGrad", "ReciprocalGrad", "InvGrad", "SoftplusGrad", "SoftplusGradExt", "HSigmoidGrad", "HSwishGrad"),
    *("LeakyReLUGradExt", "SeluGrad", "SoftShrinkGrad", "HShrinkGrad", "LogSigmoidGrad", "MishGradExt"),
)
"""Gradients of unary operators; all of their tensors have the same shape."""


def _merged(op: Operation, operands: Sequence[Operand], keep: frozenset[str]) -> Layout:
    """Sharding of the output: merged from the inputs where they are compatible; larger inputs come first, then those
    with more shards, because slicing needs no communication."""
    shape = op.output.shape
    dims: list[Dim] = [()] * len(shape)

    def order(operand: Operand) -> tuple[int, int]:
        layout, type = operand.layout, operand.type
        return (type.num_elements if type else 0, op.grid.degree(layout.axes) if layout else 1)

    for operand in sorted(operands, key=order, reverse=True):
        offset = len(shape) - len(operand.shape)
        for position, axes in enumerate(operand.dims):
            used = keep.union(*dims)
            if operand.shape[position] == shape[offset + position] and not dims[offset + position]:
                dims[offset + position] = tuple(axis for axis in axes if axis not in used)
    return op.fit(dims, shape, keep)


def broadcast_dims(dims: Layout, shape: Shape, output: Shape) -> Layout:
    """Restrict the output's sharding to an input with at most as many dims; a broadcast dim is unsharded."""
    offset = len(output) - len(shape)
    return tuple(
        dims[offset + position] if size == output[offset + position] else () for position, size in enumerate(shape)
    )


def aligned(op: Operation, keep: frozenset[str] = NONE) -> Plan:
    """Give all inputs the same layout; partial sums over `keep` stay pending where present."""
    operands = [operand for operand in op.operands if isinstance(operand, Operand)]
    dims = _merged(op, [operand for operand in operands if operand.type is not None], keep)
    wanted = tuple(
        None
        if operand.type is None
        else ValueLayout(broadcast_dims(dims, operand.shape, op.output.shape), operand.partial & keep)
        for operand in operands
    )
    return Plan(wanted, tuple(ValueLayout(dims, keep) for _ in op.types))


def _pending_that_stays(op: Operation, candidates: frozenset[str]) -> frozenset[str]:
    """Axes of partial sums that may stay pending: they shard no input, and the sum is not of a tensor smaller than the
    output, which would be cheaper to reduce first."""
    tensors = [operand for operand in op.operands if isinstance(operand, Operand) and operand.type is not None]
    if any(operand.partial and operand.shape != op.output.shape for operand in tensors):
        return NONE
    return candidates - frozenset(axis for operand in tensors for dim in operand.dims for axis in dim)


def linear_in_all(op: Operation) -> Plan:
    """f(a + a', b + b') = f(a, b) + f(a', b'): partial sums over axes common to all tensors stay pending. A number that
    is not a tensor would be added once on each rank."""
    operands = [operand for operand in op.operands if isinstance(operand, Operand)]
    tensors = [operand for operand in operands if operand.type is not None]
    common = frozenset.intersection(*(operand.partial for operand in tensors))
    return aligned(op, _pending_that_stays(op, common) if common else NONE)


def linear_in_one(op: Operation) -> Plan:
    """f(a + a', b) = f(a, b) + f(a', b): a partial sum in one of the two inputs stays pending."""
    return _linear_in(op, (0, 1))


def linear_in_first(op: Operation) -> Plan:
    """f(a + a', b) = f(a, b) + f(a', b) in the first input alone, as in a quotient."""
    return _linear_in(op, (0,))


def masked_fill(op: Operation) -> Plan:
    """Values with zeros in some positions: linear in the values. Not with other numbers, which each rank would write."""
    number = op.operands[2]
    is_zero = isinstance(number, Operand) and number.is_constant and not np.any(number.value)
    return _linear_in(op, (0,)) if is_zero else aligned(op)


def cast(op: Operation) -> Plan:
    """A cast: partial sums stay pending if it widens the type and is marked with `KEEPS_SUMS`."""
    before, after = op.tensor(0).type, op.types[0]
    widens = before and after and before.dtype in NARROW and after.dtype == "float32"
    return _linear_in(op, (0,)) if widens and op.attributes.get(KEEPS_SUMS) else aligned(op)


def _linear_in(op: Operation, inputs: tuple[int, ...]) -> Plan:
    pending = [i for i, o in enumerate(op.operands) if isinstance(o, Operand) and o.partial]
    if len(pending) != 1 or pending[0] not in inputs:
        return aligned(op)
    return aligned(op, _pending_that_stays(op, op.tensor(pending[0]).partial))


def added_up(op: Operation) -> Plan:
    """A sum of several tensors of one shape; partial sums common to all stay pending (see `propagate`, which first adds
    those with the same partial sums)."""
    (items,) = op.operands
    assert isinstance(items, tuple)
    sharding = frozenset(axis for item in items for dim in item.dims for axis in dim)
    keep = frozenset.intersection(*(item.partial for item in items)) - sharding
    most_sharded = max(items, key=lambda item: len(item.layout.axes) if item.layout else 0)
    layout = ValueLayout(op.fit(most_sharded.dims, op.output.shape, keep), keep)
    return Plan(((layout,) * len(items),), (layout,))


HANDLERS: dict[str, Handler] = {
    "Cast": cast,
    "MaskedFill": masked_fill,
    **dict.fromkeys((*UNARY, *BINARY, *GRADIENTS), aligned),
    **dict.fromkeys(("Add", "Sub", "Neg"), linear_in_all),
    **dict.fromkeys(("Mul", "Muls"), linear_in_one),
    **dict.fromkeys(("Div", "RealDiv", "Divs"), linear_in_first),
    "AddN": added_up,
}
