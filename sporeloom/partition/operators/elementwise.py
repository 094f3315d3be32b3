# SPDX-License-Identifier: Apache-2.0
"""Operators whose outputs depend on inputs at the same position only, with NumPy's broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

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
"""Attribute of a cast whose input may be a sum that is pending: what comes of it is."""
NARROW = ("bfloat16", "float16")
BINARY = (
    *("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "LogicalXor"),
    *("Maximum", "Minimum", "Pow", "FloorDiv", "FloorMod", "Mod", "TruncateDiv", "TruncateMod", "Atan2", "Xdivy"),
    *("Xlogy", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "SquaredDifference", "Hypot", "DivNoNan", "Remainder"),
    *("Select", "ClampTensor", "MaskedFill", "Lerp", "LerpScalar", "Addcmul", "Addcdiv", "DivMod", "DivMods"),
    *("BitwiseAndTensor", "BitwiseOrTensor", "BitwiseXorTensor"),
)
GRADIENTS = (
    *("AbsGrad", "ACosGrad", "AcoshGrad", "AsinGrad", "AsinhGrad", "AtanGrad", "EluGrad", "EluGradExt", "ReluGrad"),
    *("ReLU6Grad", "FastGeLUGrad", "GeLUGrad", "GeluGradExt", "SiLUGrad", "SigmoidGrad", "TanhGrad", "SqrtGrad"),
    *("RsqrtGrad", "ReciprocalGrad", "InvGrad", "SoftplusGrad", "SoftplusGradExt", "HSigmoidGrad", "HSwishGrad"),
    *("LeakyReLUGradExt", "SeluGrad", "SoftShrinkGrad", "HShrinkGrad", "LogSigmoidGrad", "MishGradExt"),
)
"""Of unary operators; all of their tensors have one shape."""


def _merged(op: Operation, operands: Sequence[Operand], keep: frozenset[str]) -> Layout:
    """Dims of the output: those of the inputs, of larger ones first and of more sharded ones among these, as far as they go
    together: a slice costs nothing."""
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
    """Of the dims of an output those of an input, which has no more dims; where it is broadcast it is not sharded."""
    offset = len(output) - len(shape)
    return tuple(
        dims[offset + position] if size == output[offset + position] else () for position, size in enumerate(shape)
    )


def aligned(op: Operation, keep: frozenset[str] = NONE) -> Plan:
    """All inputs laid out alike; sums over `keep` stay pending where they are."""
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
    """Axes of pending sums that may stay so: no input is sharded along them, and the sum is not of a smaller tensor than
    the output, which were cheaper to add up first."""
    tensors = [operand for operand in op.operands if isinstance(operand, Operand) and operand.type is not None]
    if any(operand.partial and operand.shape != op.output.shape for operand in tensors):
        return NONE
    return candidates - frozenset(axis for operand in tensors for dim in operand.dims for axis in dim)


def linear_in_all(op: Operation) -> Plan:
    """f(a + a', b + b') = f(a, b) + f(a', b'): sums that are pending in all tensors alike stay so. A number that is no
    tensor would be added once on each rank."""
    operands = [operand for operand in op.operands if isinstance(operand, Operand)]
    tensors = [operand for operand in operands if operand.type is not None]
    common = frozenset.intersection(*(operand.partial for operand in tensors))
    return aligned(op, _pending_that_stays(op, common) if common else NONE)


def linear_in_one(op: Operation) -> Plan:
    """f(a + a', b) = f(a, b) + f(a', b): sums that are pending in one of its two inputs stay so."""
    return _linear_in(op, (0, 1))


def linear_in_first(op: Operation) -> Plan:
    """The same of the first input alone: a quotient."""
    return _linear_in(op, (0,))


def cast(op: Operation) -> Plan:
    """Sums that are pending stay so where somebody has marked the cast for it and its type is the wider one."""
    before, after = op.tensor(0).type, op.types[0]
    widens = before and after and before.dtype in NARROW and after.dtype == "float32"
    return _linear_in(op, (0,)) if widens and op.attributes.get(KEEPS_SUMS) else aligned(op)


def _linear_in(op: Operation, inputs: tuple[int, ...]) -> Plan:
    pending = [i for i, o in enumerate(op.operands) if isinstance(o, Operand) and o.partial]
    if len(pending) != 1 or pending[0] not in inputs:
        return aligned(op)
    return aligned(op, _pending_that_stays(op, op.tensor(pending[0]).partial))


def added_up(op: Operation) -> Plan:
    """A sum of several tensors of one shape; sums that are pending in all alike stay so (see `propagate`, which adds up
    those with the same sums pending first)."""
    (items,) = op.operands
    assert isinstance(items, tuple)
    sharding = frozenset(axis for item in items for dim in item.dims for axis in dim)
    keep = frozenset.intersection(*(item.partial for item in items)) - sharding
    most_sharded = max(items, key=lambda item: len(item.layout.axes) if item.layout else 0)
    layout = ValueLayout(op.fit(most_sharded.dims, op.output.shape, keep), keep)
    return Plan(((layout,) * len(items),), (layout,))


HANDLERS: dict[str, Handler] = {
    "Cast": cast,
    **dict.fromkeys((*UNARY, *BINARY, *GRADIENTS), aligned),
    **dict.fromkeys(("Add", "Sub", "Neg"), linear_in_all),
    **dict.fromkeys(("Mul", "Muls"), linear_in_one),
    **dict.fromkeys(("Div", "RealDiv", "Divs"), linear_in_first),
    "AddN": added_up,
}
