# SPDX-License-Identifier: Apache-2.0
"""Handlers: for every kind of operator, from the layouts of its inputs to how the ranks compute it."""

from __future__ import annotations

from sporeloom.partition.operation import Handler, Operation, Plan, UnknownValueError, computed_unsharded
from sporeloom.partition.operators import (
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
}
"""By the primitive's name. What has none is computed unsharded."""

CONTRACTIONS = frozenset((*products.HANDLERS, *(kind for kind in labelled.HANDLERS if kind.startswith("Conv"))))
"""Operators that multiply and add up; gradients of them are some of them, too."""
ELEMENTWISE = frozenset(elementwise.HANDLERS)


def plan(op: Operation) -> Plan | None:
    """How the ranks compute an operator; None: nothing is known of it, so every rank must compute all of it."""
    handler = HANDLERS.get(op.kind)
    if handler is None or op.is_dynamic:
        return None
    try:
        return handler(op)
    except UnknownValueError:
        return None


__all__ = ["CONTRACTIONS", "ELEMENTWISE", "HANDLERS", "computed_unsharded", "plan"]
