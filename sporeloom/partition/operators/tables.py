# SPDX-License-Identifier: Apache-2.0
"""Table lookups: gather, segment reductions (the gradient of a gather) and one-hot encoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from sporeloom.partition.graph import Input, Name, RankOffset, TensorType
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.operation import Emitter, Handler, Operation, Plan
from sporeloom.partition.operators.reductions import extreme_of_all
from sporeloom.strategy.layout import Dim, Layout

IDS_BY_ROW = "ids_by_row"
"""Attribute of an operator whose second input holds ids from i * n on in row i: n (see `hints.ids_by_row`)."""

TABLE = "table"
"""Attribute of the gradient of a gather: the layout of the gathered table."""


def _without(dims: Layout, used: frozenset[str]) -> Layout:
    return tuple(tuple(axis for axis in dim if axis not in used) for dim in dims)


def gather(op: Operation) -> Plan:
    """Gather rows of a table (or slices along another dim). With sharded rows each rank looks up its local rows, with
    zeros for all others: the result is a partial sum."""
    table, indices = op.tensor(0), op.tensor(1)
    batch_dims = int(op.constant(3)) if len(op.operands) > 3 else int(op.attributes.get("batch_dims", 0))
    dim = int(op.constant(2)) % len(table.shape)
    if batch_dims:
        return _batched_gather(op, dim, batch_dims)
    in_indices = {axis for axes in indices.dims for axis in axes}
    rows = tuple(itertools.takewhile(lambda axis: axis not in in_indices, table.dims[dim]))
    used = frozenset(axis for i, axes in enumerate(table.dims) for axis in axes if i != dim)
    if rows and dim == 0 and op.output.dtype.startswith(("float", "bfloat")):
        wanted = _without(indices.dims, used)
        output = ValueLayout((*wanted, *table.dims[1:]), frozenset(rows))
        lookup = partial(_own_rows, op, rows, output)
        held = ValueLayout((rows, *table.dims[1:]))
        return Plan(op.as_they_are({0: held, 1: ValueLayout(wanted)}), (output,), rewrite=lookup)
    dims = tuple(() if i == dim else axes for i, axes in enumerate(table.dims))
    wanted = _without(indices.dims, frozenset(axis for axes in dims for axis in axes))
    output = ValueLayout((*dims[:dim], *wanted, *dims[dim + 1 :]))
    return Plan(op.as_they_are({0: ValueLayout(dims), 1: ValueLayout(wanted)}), (output,))


def _own_rows(op: Operation, rows: Dim, output: ValueLayout, emit: Emitter, inputs: Sequence[Input]) -> Sequence[Name]:
    count = op.tensor(0).shape[0] // op.grid.degree(rows)
    local = TensorType(output.local_shape(op.output.shape, op.grid), op.output.dtype)
    offset = emit.constant(RankOffset(rows, count))
    return emit.node("EmbeddingLookup", [inputs[0], inputs[1], offset], [local])


def _batched_gather(op: Operation, dim: int, batch_dims: int) -> Plan:
    """A gather with batch dims: these stay sharded, all other dims are unsharded."""
    table, indices = op.tensor(0), op.tensor(1)
    batch = tuple(a or b for a, b in zip(table.dims[:batch_dims], indices.dims[:batch_dims], strict=True))
    batch = op.fit(batch, op.output.shape[:batch_dims])
    rest_of_table: list[Dim] = [()] * (len(table.shape) - batch_dims)
    rest_of_indices: list[Dim] = [()] * (len(indices.shape) - batch_dims)
    wanted = {0: ValueLayout((*batch, *rest_of_table)), 1: ValueLayout((*batch, *rest_of_indices))}
    return Plan(op.as_they_are(wanted), (ValueLayout((*batch, *((),) * (len(op.output.shape) - batch_dims))),))


def segment_sum(op: Operation) -> Plan:
    """Sum rows by segment id: each rank adds its local rows, and the result is a partial sum over the axes that shard
    rows."""
    x, ids = op.tensor(0), op.tensor(1)
    num_row_dims = len(ids.shape)
    if op.kind == "UnsortedSegmentSum" and op.attributes.get(IDS_BY_ROW, 0) * ids.shape[0] == op.output.shape[0]:
        return _segments_by_row(op)
    if own := _own_rows_of_table(op):
        return _into_own_rows(op, own)
    rows = op.fit(x.dims[:num_row_dims], ids.shape)
    columns = _without(x.dims[num_row_dims:], frozenset(axis for dim in rows for axis in dim))
    wanted = {0: ValueLayout((*rows, *columns), x.partial), 1: ValueLayout(rows)}
    over = frozenset(axis for dim in rows for axis in dim)
    output = ValueLayout(((), *columns), over | x.partial)
    return Plan(op.as_they_are(wanted), (output,), remake=partial(_own_segments, op, wanted[1], output))


def _own_rows_of_table(op: Operation) -> Dim:
    """Axes that shard the rows of the table whose gradient this is, if gathering the added rows, so that each rank adds
    to its local rows of the table, is cheaper than reducing the full gradient."""
    table, x = op.attributes.get(TABLE), op.tensor(0)
    if op.kind != "UnsortedSegmentSum" or not isinstance(table, ValueLayout) or x.type is None:
        return ()
    own, sharding = table.dims[0], frozenset(axis for dim in x.dims for axis in dim)
    gathers = own and frozenset(own) <= sharding and not frozenset(own) & x.partial
    return own if gathers and x.type.num_elements < op.output.num_elements else ()


def _into_own_rows(op: Operation, own: Dim) -> Plan:
    x, ids = op.tensor(0), op.tensor(1)
    dims = _without(x.dims, frozenset(own))
    rows = op.fit(dims[: len(ids.shape)], ids.shape)
    over = frozenset(axis for dim in rows for axis in dim)
    columns = _without(dims[len(ids.shape) :], over)
    of_ids, made = ValueLayout(rows), ValueLayout(((), *columns), over | x.partial)
    output = ValueLayout((own, *columns), made.partial)

    def own_segments(emit: Emitter, inputs: Sequence[Input]) -> Sequence[Name]:
        name = _own_segments(op, of_ids, made, emit, inputs, output)
        assert name is not None
        return (name,)

    wanted = {0: ValueLayout((*rows, *columns), x.partial), 1: of_ids}
    return Plan(op.as_they_are(wanted), (output,), rewrite=own_segments)


def _segments_by_row(op: Operation) -> Plan:
    """A segment sum in which each row of ids has its own segments: sharding by rows shards the segments, too."""
    x, ids = op.tensor(0), op.tensor(1)
    num_row_dims = len(ids.shape)
    most = max((ids.dims[0], x.dims[0]), key=op.grid.degree)
    rest = _without(x.dims[1:num_row_dims], frozenset(most))
    own, *others = rows = op.fit((most, *rest), ids.shape)
    columns = _without(x.dims[num_row_dims:], frozenset(axis for dim in rows for axis in dim))
    wanted = {0: ValueLayout((*rows, *columns), x.partial - frozenset(own)), 1: ValueLayout(rows)}
    output = ValueLayout((own, *columns), wanted[0].partial.union(*others))
    return Plan(
        op.as_they_are(wanted), (output,), rewrite=partial(_of_own_rows, op, wanted[1], output) if own else None
    )


def _of_own_rows(
    op: Operation, of_ids: ValueLayout, output: ValueLayout, emit: Emitter, inputs: Sequence[Input]
) -> Sequence[Name]:
    """Subtract the first local segment from the ids, so that they index the rank's local segments."""
    ids, own = op.tensor(1).type, output.dims[0]
    assert ids is not None
    length = op.output.shape[0] // op.grid.degree(own)
    local, number = TensorType(of_ids.local_shape(ids.shape, op.grid), ids.dtype), TensorType((), ids.dtype)
    (from_own,) = emit.node("Sub", [inputs[1], emit.constant(RankOffset(own, length), number)], [local])
    result = TensorType(output.local_shape(op.output.shape, op.grid), op.output.dtype)
    return emit.node(op.kind, [inputs[0], from_own, emit.constant(length)], [result])


def _own_segments(
    op: Operation, of_ids: ValueLayout, made: ValueLayout, emit: Emitter, inputs: Sequence[Input], wanted: ValueLayout
) -> Name | None:
    """The sums of a rank's local segments: ids are counted from the first local one, and all others become negative,
    which drops them."""
    own = wanted.dims[0]
    if not own or (wanted.dims[1:], wanted.partial) != (made.dims[1:], made.partial):
        return None
    count, ids = op.output.shape[0], op.tensor(1).type
    assert ids is not None
    local, number = TensorType(of_ids.local_shape(ids.shape, op.grid), ids.dtype), TensorType((), ids.dtype)
    length = count // op.grid.degree(own)
    (from_own,) = emit.node("Sub", [inputs[1], emit.constant(RankOffset(own, length), number)], [local])
    (away,) = emit.node("FloorDiv", [from_own, emit.constant(length, number)], [local])  # 0 for local segments
    (far,) = emit.node("Mul", [*emit.node("Abs", [away], [local]), emit.constant(count, number)], [local])
    (mine,) = emit.node("Sub", [from_own, far], [local])
    result = TensorType(wanted.local_shape(op.output.shape, op.grid), op.output.dtype)
    return emit.node(op.kind, [inputs[0], mine, emit.constant(length)], [result])[0]


def segment_extreme(op: Operation, reduction: str) -> Plan:
    """Maximum, minimum or product by segment: reduced locally, then all-reduced."""
    plan = segment_sum(op)
    x, rows, (output,) = plan.inputs[0], plan.inputs[1], plan.outputs
    assert isinstance(x, ValueLayout) and isinstance(rows, ValueLayout) and output is not None
    over, output = op.grid.in_order(rows.axes), ValueLayout(output.dims)
    local = TensorType(output.local_shape(op.output.shape, op.grid), op.output.dtype)
    rewrite = partial(extreme_of_all, local, over, reduction) if over else None
    return Plan((x.reduced(), *plan.inputs[1:]), (output,), rewrite=rewrite)


def scatter_along_dim(op: Operation) -> Plan:
    """`TensorScatterElements(x, indices, updates)` along one dim, which is unsharded; the other dims are sharded
    equally."""
    x, indices = op.tensor(0), op.tensor(1)
    along = int(op.setting(3, "axis")) % len(x.shape)
    same = [i != along and size == indices.shape[i] for i, size in enumerate(x.shape)]
    dims = tuple(axes if alike else () for alike, axes in zip(same, x.dims, strict=True))
    layout = ValueLayout(dims)
    return Plan(op.as_they_are(dict.fromkeys(range(3), layout)), (layout,))


def one_hot(op: Operation) -> Plan:
    """One-hot encoding: the sharding follows the indices, and the new dim is unsharded."""
    indices = op.tensor(0)
    axis = op.constant(4) if len(op.operands) > 4 else op.attributes.get("axis", -1)
    position = int(axis) % len(op.output.shape)
    dims = (*indices.dims[:position], (), *indices.dims[position:])
    remake = partial(_own_columns, op, position, ValueLayout(dims)) if len(op.operands) > 4 else None
    return Plan(op.as_they_are({0: ValueLayout(indices.dims)}), (ValueLayout(dims),), remake=remake)


def _own_columns(
    op: Operation, position: int, made: ValueLayout, emit: Emitter, inputs: Sequence[Input], wanted: ValueLayout
) -> Name | None:
    """The local columns of the new dim: indices outside of them are zero in all of it."""
    own = wanted.dims[position]
    if not own or wanted.dims != (*made.dims[:position], own, *made.dims[position + 1 :]):
        return None
    indices = op.tensor(0)
    assert indices.type is not None and indices.layout is not None
    local = TensorType(indices.layout.reduced().local_shape(indices.shape, op.grid), indices.type.dtype)
    length = op.output.shape[position] // op.grid.degree(own)
    offset = emit.constant(RankOffset(own, length), TensorType((), indices.type.dtype))
    (from_own,) = emit.node("Sub", [inputs[0], offset], [local])
    result = TensorType(wanted.local_shape(op.output.shape, op.grid), op.output.dtype)
    return emit.node(op.kind, [from_own, emit.constant(length), *inputs[2:]], [result])[0]


HANDLERS: dict[str, Handler] = {
    "Gather": gather,
    "UnsortedSegmentSum": segment_sum,
    "UnsortedSegmentMax": partial(segment_extreme, reduction="max"),
    "UnsortedSegmentMin": partial(segment_extreme, reduction="min"),
    "UnsortedSegmentProd": partial(segment_extreme, reduction="prod"),
    "OneHot": one_hot,
    "TensorScatterElements": scatter_along_dim,
}
