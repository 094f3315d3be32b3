# SPDX-License-Identifier: Apache-2.0
"""Handlers: for each kind of operator, a function from the layouts of the inputs to a plan of the sharded computation."""

from __future__ import annotations

from sporeloom.partition.operation import Handler, Operation, Plan, UnknownValueError, computed_unsharded
from sporeloom.partition.operators import (
    attention,
    elementwise,
    indices,
    labelled,
    losses,
    normalization,
    products,
    recurrent,
    reductions,
    shapes,
    tables,
)

HANDLERS: dict[str, Handler] = {
    **elementwise.HANDLERS,
    **products.HANDLERS,
    **reductions.HANDLERS,
    **shapes.HANDLERS,
    **tables.HANDLERS,
    **normalization.HANDLERS,
    **labelled.HANDLERS,
    **indices.HANDLERS,
    **losses.HANDLERS,
    **recurrent.HANDLERS,
    **attention.HANDLERS,
}
"""Handlers by name of the primitive. An operator without a handler is computed unsharded."""

CONTRACTIONS = frozenset((*products.HANDLERS, *(kind for kind in labelled.HANDLERS if kind.startswith("Conv"))))
"""Operators that contract dims (multiply and sum), such as matrix products and convolutions; their gradients are, too."""
ELEMENTWISE = frozenset(elementwise.HANDLERS)


def plan(op: Operation) -> Plan | None:
    """Plan the sharded computation of an operator; None without a handler: every rank must compute it in full."""
    handler = HANDLERS.get(op.kind)
    if handler is None or op.is_dynamic:
        return None
    try:
        return handler(op)
    except UnknownValueError:
        return None


__all__ = ["CONTRACTIONS", "ELEMENTWISE", "HANDLERS", "computed_unsharded", "plan"]
