# SPDX-License-Identifier: Apache-2.0
"""Fused recurrent layers: sharded along the batch, which is dim 1 of all of their tensors."""

from __future__ import annotations

from collections.abc import Sequence

from sporeloom.partition.graph import Input, Name, TensorType
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.operation import Emitter, Handler, Operation, Plan
from sporeloom.strategy.layout import Dim

WEIGHTS, RESERVE = 3, 10
"""Inputs of the gradient: all weights in one tensor, and the buffer reserved by the forward operator."""


def _by_batch(num_dims: int, batch: Dim) -> ValueLayout:
    return ValueLayout(tuple(batch if dim == 1 else () for dim in range(num_dims)))


def lstm(op: Operation) -> Plan:
    """LSTM of x with the initial states h and c and the weights; returns all h, the last h and c, and two reserved buffers.

    The buffers are opaque and are valid only for the same local batch. MindSpore declares them as shape (1, 1); dim 0 is
    marked with the sharding of the batch, which the gradient reads from it.
    """
    x = op.tensor(0)
    (batch,) = op.fit([x.dims[1]], (x.shape[1],))
    wanted = {i: _by_batch(3, batch) for i in range(WEIGHTS)}
    kept = ValueLayout((batch, ()))
    outputs = (*(_by_batch(3, batch) for _ in range(3)), kept, kept)

    def of_own_rows(emit: Emitter, inputs: Sequence[Input]) -> Sequence[Name]:
        types = [type for type in op.types if type is not None]
        own = [TensorType(y.local_shape(t.shape, op.grid), t.dtype) for y, t in zip(outputs[:3], types, strict=False)]
        return emit.operator(inputs, [*own, *types[3:]])

    return Plan(op.as_they_are(wanted), outputs, rewrite=of_own_rows)


def lstm_gradient(op: Operation) -> Plan:
    """Gradients of LSTM with respect to x, h, c and the weights; the last is a partial sum over the batch."""
    batch = op.tensor(RESERVE).dims[0]
    wanted = {i: _by_batch(3, batch) for i in range(RESERVE) if i != WEIGHTS}
    wanted[RESERVE] = ValueLayout((batch, ()))
    of_weights = ValueLayout(((), (), ()), frozenset(batch))
    return Plan(op.as_they_are(wanted), (*(_by_batch(3, batch) for _ in range(3)), of_weights))


HANDLERS: dict[str, Handler] = {"LSTM": lstm, "LSTMGrad": lstm_gradient}
