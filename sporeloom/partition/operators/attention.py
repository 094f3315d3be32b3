# SPDX-License-Identifier: Apache-2.0
"""FlashAttentionScore and its gradient: rows, heads and the positions of queries may be sharded.

That holds for the form in which the mask says everything: (B, H, T, D), one mask for each pair of positions, no dropout, no
bias, no lengths. In any other form the operator is computed unsharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sporeloom.partition.layout import NONE, ValueLayout
from sporeloom.partition.operation import Handler, Operand, Operation, Plan, UnknownValueError
from sporeloom.strategy.layout import Dim

BNSD, FULL_MASK = 1, 0
"""MindSpore's numbers of the input layout (B, H, T, D) and of the mode with a full mask."""


def flash_attention(op: Operation, mask: int, none: Sequence[int], num_heads: int, is_gradient: bool) -> Plan:
    """Plan attention of queries (B, H, T, D) to keys and values (B, KV, S, D), KV dividing H.

    Query heads are sharded as the heads of keys and values that they share, so the degree divides KV. The number of heads
    is an input and becomes the local one. Gradients of keys and values are partial sums over the axes that shard T.

    Args:
        mask: index of the mask, (B or 1, 1, T, S).
        none: indices of inputs that must be absent.
        num_heads: index of the number of query heads, which further settings follow.
    """
    query, key = op.tensor(0), op.tensor(1)
    if not _is_supported(op, mask, none, num_heads):
        raise UnknownValueError(f"{op.kind}: another form than (B, H, T, D) with a full mask")
    heads_of = query if query.dims[1] else key
    (rows,) = op.fit([query.dims[0]], (query.shape[0],))
    (heads,) = op.fit([heads_of.dims[1]], (key.shape[1],), frozenset(rows))
    (positions,) = op.fit([query.dims[2]], (query.shape[2],), frozenset((*rows, *heads)))
    of_queries, of_keys = _layout(rows, heads, positions), _layout(rows, heads, ())
    wanted = {0: of_queries, 1: of_keys, 2: of_keys}
    if is_gradient:
        wanted |= {3: of_queries, 8: of_queries, 9: of_queries, 11: of_queries}
    hidden = op.tensor(mask)
    wanted[mask] = _layout(rows if hidden.shape[0] > 1 else (), (), positions)
    local = {num_heads: query.shape[1] // op.grid.degree(heads)}
    if is_gradient:
        summed = ValueLayout(of_keys.dims, NONE.union(positions))
        return Plan(op.as_they_are(wanted), (of_queries, summed, summed, *_others(op, 3)), local)
    return Plan(op.as_they_are(wanted), (of_queries, of_queries, *_others(op, 2, 3), of_queries), local)


def _is_supported(op: Operation, mask: int, none: Sequence[int], num_heads: int) -> bool:
    heads, keep_prob, _, before, after, _, layout, mode = (op.constant(num_heads + i) for i in range(8))
    query, hidden = op.tensor(0), op.operands[mask]
    longest = max(query.shape[2:3] + op.tensor(1).shape[2:3], default=0)
    has_mask = isinstance(hidden, Operand) and hidden.type is not None and len(hidden.shape) == 4
    is_plain = keep_prob == 1.0 and min(before, after) >= longest and all(op.constant(i) is None for i in none)
    return has_mask and is_plain and (layout, mode) == (BNSD, FULL_MASK) and query.shape[1] == heads


def _layout(rows: Dim, heads: Dim, positions: Dim) -> ValueLayout:
    return ValueLayout((rows, heads, positions, ()))


def _others(op: Operation, start: int, end: int | None = None) -> list[ValueLayout | None]:
    """Layouts of outputs that nobody uses, replicated."""
    return [None if type is None else ValueLayout(((),) * len(type.shape)) for type in op.types[start:end]]


HANDLERS: dict[str, Handler] = {
    "FlashAttentionScore": partial(flash_attention, mask=6, none=(3, 4, 5, 7, 8, 9), num_heads=10, is_gradient=False),
    "FlashAttentionScoreGrad": partial(
        flash_attention, mask=7, none=(4, 5, 6, 12, 13, 14), num_heads=15, is_gradient=True
    ),
}
