# SPDX-License-Identifier: Apache-2.0
"""Layer normalization and softmax: the normalized dims are unsharded, rows may be sharded."""

from __future__ import annotations

from functools import partial

from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.operation import Handler, Operand, Operation, Plan
from sporeloom.partition.operators.reductions import reduced_dims


def over_last_dims(op: Operation) -> Plan:
    """LayerNorm or RmsNorm of x with its parameters; the outputs are the normalized x and statistics of each row."""
    x = op.tensor(0)
    num_normed = len(op.tensor(1).shape)
    num_rows = len(x.shape) - num_normed
    rows = x.dims[:num_rows]
    layout = ValueLayout((*rows, *((),) * num_normed))
    outputs = [layout]
    for type in op.types[1:]:
        assert type is not None
        outputs.append(ValueLayout((*rows, *((),) * (len(type.shape) - num_rows))))
    return Plan(op.as_they_are({0: layout}), tuple(outputs))


def gradient_over_last_dims(op: Operation, num_of_rows: int) -> Plan:
    """The gradient of LayerNorm or RmsNorm: the first `num_of_rows` inputs have rows, then follows the scale; gradients
    of parameters are partial sums over the axes that shard the rows."""
    x, scale = op.tensor(0), op.tensor(num_of_rows)
    num_rows = len(x.shape) - len(scale.shape)
    rows = x.dims[:num_rows]
    wanted = {i: ValueLayout((*rows, *((),) * (len(op.tensor(i).shape) - num_rows))) for i in range(num_of_rows)}
    over = frozenset(axis for dim in rows for axis in dim)
    outputs = [ValueLayout((*rows, *((),) * len(scale.shape)))]
    outputs += [ValueLayout(((),) * len(scale.shape), over) for _ in op.types[1:]]
    return Plan(op.as_they_are(wanted), tuple(outputs))


def along_named_dim(op: Operation, index: int) -> Plan:
    """Softmax and similar operators along the dims in an input, which are unsharded."""
    x = op.tensor(0)
    dims = reduced_dims(op, index)
    layout = ValueLayout(tuple(() if dim in dims else axes for dim, axes in enumerate(x.dims)))
    tensors = {
        i: layout
        for i, operand in enumerate(op.operands)
        if isinstance(operand, Operand) and operand.type is not None and operand.shape == x.shape
    }
    return Plan(op.as_they_are(tensors), tuple(layout for _ in op.types))


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("LayerNorm", "RmsNorm"), over_last_dims),
    "LayerNormGrad": partial(gradient_over_last_dims, num_of_rows=4),
    "RmsNormGrad": partial(gradient_over_last_dims, num_of_rows=3),
    **dict.fromkeys(("Softmax", "LogSoftmax"), partial(along_named_dim, index=1)),
    **dict.fromkeys(("SoftmaxBackward", "LogSoftmaxGrad"), partial(along_named_dim, index=2)),
}
