# SPDX-License-Identifier: Apache-2.0
"""Operators that gather, scatter, sort or pad along dims: top-k, argmax, N-d indices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.operation import Handler, Operand, Operation, Plan, UnknownValueError
from sporeloom.partition.operators.labelled import along
from sporeloom.partition.operators.reductions import along_dim, picked_along_dim


def along_one_dim(op: Operation, tensors: Sequence[int], linear: Sequence[int] = (), dim: int = 1) -> Plan:
    """Gather from or scatter into `tensors` along the dim in input `dim`: that dim is unsharded, and so is each dim
    whose size differs between the tensors."""
    operands = [op.tensor(i) for i in tensors]
    shapes = [o.shape for o in operands] + [op.output.shape]
    along_which = int(op.constant(dim)) % len(shapes[0])
    labels = [
        "." if i == along_which or len({shape[i] for shape in shapes}) > 1 else f"d{i}" for i in range(len(shapes[0]))
    ]
    term = " ".join(labels)
    terms = [term if i in tensors else "-" for i in range(max(tensors) + 1)]
    return along(op, f"{', '.join(terms)} -> {term}", linear)


def _coordinates(op: Operation, index: int, num_dims: int) -> tuple[str, str, int]:
    """Labels of the batch dims of N-d indices (input `index`) and of the remaining dims of a tensor with `num_dims`
    dims, and the number of leading dims that the indices address."""
    *own, named = op.tensor(index).shape
    return " ".join(f"i{k}" for k in range(len(own))), " ".join(f"d{k}" for k in range(named, num_dims)), named


def gather_nd(op: Operation) -> Plan:
    """Gather slices by N-d indices: x[indices[..., 0], indices[..., 1], ...]"""
    own, left, named = _coordinates(op, 1, len(op.tensor(0).shape))
    return along(op, f"{'. ' * named}{left}, {own} . -> {own} {left}", (0,))


def scatter_nd(op: Operation) -> Plan:
    """Add rows at N-d indices into zeros: each rank adds its local rows, and the result is a partial sum."""
    own, left, named = _coordinates(op, 0, len(op.output.shape))
    summed = " ".join(f"+{label}" for label in own.split())
    return along(op, f"{own} ., {own} {left}, = -> {summed} {'. ' * named}{left}", (1,))


def scattered_into(op: Operation) -> Plan:
    """Scatter rows into a tensor at N-d indices: every rank scatters all rows."""
    own, left, named = _coordinates(op, 1, len(op.tensor(0).shape))
    own = own.replace("i", "").translate(str.maketrans("0123456789", "." * 10))
    whole = f"{'. ' * named}{left}"
    return along(op, f"{whole}, {own} ., {own} {left} -> {whole}")


def by_attribute(op: Operation, name: str, default: int) -> Plan:
    """Sort along the dim in an attribute, which is unsharded."""
    return _whole_along(op, int(op.attributes.get(name, default)))


def _whole_along(op: Operation, dim: int) -> Plan:
    x = op.tensor(0)
    dim %= len(x.shape)
    layout = ValueLayout(tuple(() if i == dim else axes for i, axes in enumerate(x.dims)))
    return Plan(op.as_they_are({0: layout}), tuple(layout for _ in op.types))


def largest(op: Operation, dim: int | None = None) -> Plan:
    """Top-k or sort along the last dim, or along the dim in input `dim`, which is unsharded."""
    return _whole_along(op, -1 if dim is None or dim >= len(op.operands) else int(op.constant(dim)))


def padded(op: Operation) -> Plan:
    """Pad a tensor: dims that grow or shrink are unsharded. With paddings that do not start at the last dim, all dims
    are."""
    x = op.tensor(0)
    pads = op.constant(1)
    if not isinstance(pads, tuple) or not op.attributes.get("paddings_contiguous", True):
        raise UnknownValueError(f"{op.kind}: paddings that are computed")
    grown = {len(x.shape) - 1 - i // 2 for i, pad in enumerate(pads) if pad}
    layout = ValueLayout(tuple(() if dim in grown else axes for dim, axes in enumerate(x.dims)))
    return Plan(op.as_they_are({0: layout}), (layout,))


def unstacked(op: Operation) -> Plan:
    """Split along a dim into one output for each index; that dim is unsharded."""
    x = op.tensor(0)
    axis = op.setting(1, "axis")
    dim = int(axis) % len(x.shape)
    whole = tuple(() if i == dim else axes for i, axes in enumerate(x.dims))
    output = ValueLayout(whole[:dim] + whole[dim + 1 :], x.partial)
    return Plan(op.as_they_are({0: ValueLayout(whole, x.partial)}), tuple(output for _ in op.types))


def picked_with_value(op: Operation) -> Plan:
    """Argmax and the like, with or without the value (with or without kept dims)."""
    plan = picked_along_dim(op)
    operand = op.operands[1] if len(op.operands) > 1 else None
    if isinstance(operand, Operand) and operand.value is None:
        raise UnknownValueError(f"{op.kind}: of all elements")  # an index into the flattened tensor
    return plan


HANDLERS: dict[str, Handler] = {
    "GatherD": partial(along_one_dim, tensors=(0, 2), linear=(0,)),
    "GatherDGradV2": partial(along_one_dim, tensors=(0, 2, 3), linear=(3,)),
    "Scatter": partial(along_one_dim, tensors=(0, 2, 3)),
    "ScatterValue": partial(along_one_dim, tensors=(0, 2)),
    "GatherNd": gather_nd,
    "ScatterNd": scatter_nd,
    **dict.fromkeys(
        [f"TensorScatter{what}" for what in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Update")], scattered_into
    ),
    "Sort": partial(by_attribute, name="axis", default=-1),
    "SortExt": partial(largest, dim=1),
    "TopK": largest,
    "TopkExt": partial(largest, dim=2),
    **dict.fromkeys(
        ("Argmax", "Argmin", "ArgMaxExt", "ArgMinExt", "ArgMaxWithValue", "ArgMinWithValue"), picked_with_value
    ),
    "PadV3": padded,
    "Roll": partial(along_dim, index=2),
    "Unstack": unstacked,
}
