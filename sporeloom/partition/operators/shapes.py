# SPDX-License-Identifier: Apache-2.0
"""Operators that move elements without computing: all are linear, so partial sums stay pending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from sporeloom.partition.graph import Input, Name, TensorType
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.operation import Emitter, Handler, Operand, Operation, Plan
from sporeloom.strategy.layout import Dim, Layout, Shape


def _same_pending(op: Operation, dims: Layout) -> ValueLayout:
    x = op.tensor(0)
    return ValueLayout(dims, x.partial)


def transpose(op: Operation) -> Plan:
    x = op.tensor(0)
    order = [int(dim) % len(x.shape) for dim in op.constant(1)]
    dims = tuple(x.dims[dim] for dim in order)
    return Plan(op.as_they_are({0: _same_pending(op, x.dims)}), (_same_pending(op, dims),))


def expand_dims(op: Operation) -> Plan:
    x = op.tensor(0)
    position = int(op.constant(1))
    position += len(x.shape) + 1 if position < 0 else 0
    dims = (*x.dims[:position], (), *x.dims[position:])
    return Plan(op.as_they_are({0: _same_pending(op, x.dims)}), (_same_pending(op, dims),))


def groups_of_dims(old: Shape, new: Shape) -> Iterator[tuple[range, range]]:
    """Pair the dims of two shapes in the shortest runs of equal size: (2, 3, 4) and (6, 4) give (2, 3)-(6) and (4)-(4)."""
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        size_old = size_new = 1
        if i < len(old):
            size_old, i = old[i], i + 1
        if j < len(new):
            size_new, j = new[j], j + 1
        while size_old != size_new:
            if size_old < size_new:
                size_old, i = size_old * old[i], i + 1
            else:
                size_new, j = size_new * new[j], j + 1
        yield range(first_i, i), range(first_j, j)


def reshape(op: Operation) -> Plan:
    """Reshape: shards that are contiguous in memory stay local if their axes also divide the dims of the other shape."""
    x, new = op.tensor(0), op.output.shape
    if 0 in x.shape or 0 in new:
        return Plan(op.as_they_are({}), (ValueLayout(((),) * len(new)),))
    source: list[Dim] = [()] * len(x.shape)
    target: list[Dim] = [()] * len(new)
    for olds, news in groups_of_dims(x.shape, new):
        axes = _contiguous(op, [(x.shape[dim], x.dims[dim]) for dim in olds])
        axes = [axis for dim in _dealt(op, axes, [new[dim] for dim in news]) for axis in dim]
        for dim, own in zip(olds, _dealt(op, axes, [x.shape[dim] for dim in olds]), strict=True):
            source[dim] = own
        for dim, own in zip(news, _dealt(op, axes, [new[dim] for dim in news]), strict=True):
            target[dim] = own
    output = _same_pending(op, tuple(target))
    constants = {1: output.local_shape(new, op.grid)} if len(op.operands) > 1 else {}
    return Plan(op.as_they_are({0: _same_pending(op, tuple(source))}), (output,), constants)


def _contiguous(op: Operation, dims: Sequence[tuple[int, Dim]]) -> list[str]:
    """Axes that shard a run of dims, given as (size, axes), into contiguous pieces: axes of a dim count only if all
    dims before it are sharded to size 1."""
    found: list[str] = []
    for size, axes in dims:
        found += axes
        if op.grid.degree(axes) != size:
            break
    return found


def _dealt(op: Operation, axes: Sequence[str], sizes: Sequence[int]) -> list[Dim]:
    """Assign the leading `axes` to a run of dims, as many as divide them: on to the next dim once a dim has local size
    1."""
    dims: list[Dim] = []
    left = list(axes)
    for size in sizes:
        own: list[str] = []
        while left and size % (op.grid.degree(own) * op.grid.degrees[left[0]]) == 0:
            own.append(left.pop(0))
        dims.append(tuple(own))
        if op.grid.degree(own) != size:
            left = []
    return dims


def broadcast(op: Operation, index: int = 1) -> Plan:
    """Broadcast to a larger shape: dims that grow are unsharded."""
    x, new = op.tensor(0), op.output.shape
    offset = len(new) - len(x.shape)
    dims = tuple(axes if x.shape[dim] == new[offset + dim] else () for dim, axes in enumerate(x.dims))
    output = _same_pending(op, (((),) * offset) + dims)
    return Plan(op.as_they_are({0: _same_pending(op, dims)}), (output,), {index: output.local_shape(new, op.grid)})


def tile(op: Operation) -> Plan:
    """Repeat dims: repeated dims are unsharded; the number of repetitions is the same on each rank. Ranks that need shards of
    a dim of size 1 repeat it less often."""
    x, new = op.tensor(0), op.output.shape
    offset = len(new) - len(x.shape)
    dims = tuple(axes if x.shape[dim] == new[offset + dim] else () for dim, axes in enumerate(x.dims))
    made = _same_pending(op, ((),) * offset + dims)
    return Plan(op.as_they_are({0: _same_pending(op, dims)}), (made,), remake=partial(_tiled_less, op, made))


def _tiled_less(
    op: Operation, made: ValueLayout, emit: Emitter, inputs: Sequence[Input], wanted: ValueLayout
) -> Name | None:
    old, new = op.tensor(0).shape, op.output.shape
    ones = (1,) * (len(new) - len(old)) + old
    differs = [dim for dim, (axes, own) in enumerate(zip(wanted.dims, made.dims, strict=True)) if axes != own]
    if wanted.partial != made.partial or not differs or any(ones[dim] != 1 for dim in differs):
        return None
    local = wanted.local_shape(new, op.grid)
    times = tuple(n // size if size == 1 else 1 for n, size in zip(local, ones, strict=True))
    if any(size not in (1, n) for size, n in zip(ones, new, strict=True)):
        return None
    return emit.node("Tile", [inputs[0], emit.constant(times)], [TensorType(local, op.output.dtype)])[0]


def _joined(op: Operation, items: Sequence[Operand], free: int | None) -> tuple[Layout, frozenset[str]]:
    """A sharding and partial sums common to inputs with the same number of dims, with dim `free` unsharded."""
    keep = frozenset.intersection(*(item.partial for item in items))
    keep -= frozenset(axis for item in items for dim in item.dims for axis in dim)
    most_sharded = max(items, key=lambda item: len(item.layout.axes) if item.layout else 0)
    wanted = [() if dim == free else axes for dim, axes in enumerate(most_sharded.dims)]
    smallest = tuple(min(item.shape[dim] for item in items) for dim in range(len(wanted)))
    return op.fit(wanted, smallest, keep), keep


def concatenate(op: Operation) -> Plan:
    """Concatenate along an unsharded dim."""
    items = op.operands[0]
    assert isinstance(items, tuple)
    dim = int(op.constant(1)) % len(op.output.shape)
    dims, keep = _joined(op, items, dim)
    layout = ValueLayout(dims, keep)
    rest = tuple(None for _ in op.operands[1:])
    return Plan(((layout,) * len(items), *rest), (layout,))


def stack(op: Operation) -> Plan:
    items = op.operands[0]
    assert isinstance(items, tuple)
    position = int(op.setting(1, "axis")) % len(op.output.shape)
    dims, keep = _joined(op, items, None)
    output = ValueLayout((*dims[:position], (), *dims[position:]), keep)
    rest = tuple(None for _ in op.operands[1:])
    return Plan(((ValueLayout(dims, keep),) * len(items), *rest), (output,))


def split(op: Operation, index: int = 1) -> Plan:
    """Split along the dim in input `index`, which is unsharded, into outputs of the same layout."""
    x = op.tensor(0)
    dim = int(op.constant(index)) % len(x.shape)
    layout = _same_pending(op, tuple(() if i == dim else axes for i, axes in enumerate(x.dims)))
    return Plan(op.as_they_are({0: layout}), tuple(layout for _ in op.types))


def strided_slice(op: Operation) -> Plan:
    """Strided slice: dims that are taken in full stay sharded. The others are gathered, and the result is sharded again
    locally, for example rows of a batch that is replicated on every rank at first."""
    x, new = op.tensor(0), op.output.shape
    taken = _taken(op, x.shape, 1)
    if taken is None:
        return Plan(op.as_they_are({}), (ValueLayout(((),) * len(new)),))
    held = _same_pending(op, _where(taken.whole, x.dims))
    layout = ValueLayout(tuple(held.dims[dim] for dim in taken.kept), held.partial)
    again = layout
    if len(taken.kept) == len(x.shape):
        again = _same_pending(op, op.fit(x.dims, new, x.partial))
    rewrite = None if again == layout else partial(_taken_and_sharded, op, layout, again)
    return Plan(op.as_they_are({0: held}), (again,), {2: _own_ends(op, 2, held, x.shape)}, rewrite=rewrite)


def _taken_and_sharded(
    op: Operation, taken: ValueLayout, again: ValueLayout, emit: Emitter, inputs: Sequence[Input]
) -> Sequence[Name]:
    type = TensorType(taken.local_shape(op.output.shape, op.grid), op.output.dtype)
    names = emit.operator(inputs, [type])
    dims = list(taken.dims)
    for dim, axes in enumerate(again.dims):
        for run in op.grid.runs(axes[len(dims[dim]) :]):
            dims[dim] += run
            type = TensorType(ValueLayout(tuple(dims)).local_shape(op.output.shape, op.grid), type.dtype)
            names = emit.node("SliceOfRank", names, [type], {"axes": run, "dim": dim})
    return names


def strided_slice_grad(op: Operation) -> Plan:
    """Gradient of a strided slice: writes dy into zeros of the given shape."""
    dy, shape = op.tensor(0), op.output.shape
    taken = _taken(op, shape, 2)
    if taken is None:
        return Plan(op.as_they_are({}), (ValueLayout(((),) * len(shape)),))
    dims: list[Dim] = [()] * len(shape)
    for own, dim in zip(dy.dims, taken.kept, strict=True):
        dims[dim] = own if taken.whole[dim] else ()
    layout = _same_pending(op, tuple(dims))
    given = ValueLayout(tuple(dims[dim] for dim in taken.kept), layout.partial)
    own_shape = {1: layout.local_shape(shape, op.grid), 3: _own_ends(op, 3, layout, shape)}
    return Plan(op.as_they_are({0: given}), (layout,), own_shape)


class _Taken(NamedTuple):
    """The dims that a slice takes."""

    whole: list[bool]
    """For each dim, whether it is taken in full."""
    kept: list[int]
    """Dims that the slice keeps."""


MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def _taken(op: Operation, shape: Shape, first: int) -> _Taken | None:
    """Analyse a slice; None if a mask adds dims, or has an ellipsis.

    Inputs `first` to `first` + 2 are begin, end and strides; the masks are the inputs after these, or attributes.
    """
    begin, end, strides = (list(map(int, op.constant(i))) for i in range(first, first + 3))
    given = [op.constant(i) for i in range(first + 3, len(op.operands))]
    from_begin, to_end, ellipsis, new_axes, dropped = (
        given[place] if place < len(given) else op.attributes.get(name, 0) for place, name in enumerate(MASKS)
    )
    if ellipsis or new_axes:
        return None

    def is_whole(dim: int) -> bool:
        bit = 1 << dim
        starts = from_begin & bit or begin[dim] == 0
        return bool(not dropped & bit and starts and (to_end & bit or end[dim] >= shape[dim]) and strides[dim] == 1)

    whole = [dim >= len(begin) or is_whole(dim) for dim in range(len(shape))]
    return _Taken(whole, [dim for dim in range(len(shape)) if not dropped & 1 << dim])


def _where(keep: Sequence[bool], dims: Layout) -> Layout:
    return tuple(axes if kept else () for kept, axes in zip(keep, dims, strict=True))


def _own_ends(op: Operation, index: int, layout: ValueLayout, shape: Shape) -> tuple[int, ...]:
    """The ends of a slice (input `index`), with the local size for sharded dims."""
    local = layout.local_shape(shape, op.grid)
    return tuple(local[dim] if layout.dims[dim] else int(end) for dim, end in enumerate(op.constant(index)))


def slice_of(op: Operation) -> Plan:
    """`Slice(x, begin, size)`: dims that are taken in full stay sharded."""
    x = op.tensor(0)
    begin, size = (list(map(int, op.constant(i))) for i in (1, 2))
    takes_all = [b == 0 and s in (-1, n) for b, s, n in zip(begin, size, x.shape, strict=True)]
    layout = _same_pending(op, _where(takes_all, x.dims))
    local = layout.local_shape(op.output.shape, op.grid)
    return Plan(op.as_they_are({0: layout}), (layout,), {2: local})


def squeeze(op: Operation) -> Plan:
    """Drop dims of size 1. Emitted as a reshape, because a local shard of another dim may have size 1 as well and must
    stay."""
    x, new = op.tensor(0), op.output.shape
    long = iter([axes for axes, size in zip(x.dims, x.shape, strict=True) if size > 1])
    output = _same_pending(op, tuple(next(long) if size > 1 else () for size in new))
    local = TensorType(output.local_shape(new, op.grid), op.output.dtype)
    return Plan(op.as_they_are({0: _same_pending(op, x.dims)}), (output,), rewrite=partial(_reshaped, local))


def _reshaped(local: TensorType, emit: Emitter, inputs: Sequence[Input]) -> Sequence[Name]:
    return emit.node("Reshape", [inputs[0], emit.constant(local.shape)], [local])


def unchanged(op: Operation) -> Plan:
    """Pass the first input through unchanged."""
    x = op.tensor(0)
    assert x.layout is not None
    return Plan(op.as_they_are({0: x.layout}), (x.layout,))


def reversed_along(op: Operation) -> Plan:
    """Flip dims, which are gathered."""
    x = op.tensor(0)
    dims = {int(dim) % len(x.shape) for dim in op.constant(1)}
    layout = _same_pending(op, tuple(() if dim in dims else axes for dim, axes in enumerate(x.dims)))
    return Plan(op.as_they_are({0: layout}), (layout,))


HANDLERS: dict[str, Handler] = {
    "Transpose": transpose,
    "ExpandDims": expand_dims,
    **dict.fromkeys(("Reshape", "View"), reshape),
    "BroadcastTo": partial(broadcast, index=1),
    "Tile": tile,
    **dict.fromkeys(("Concat", "ConcatV2"), concatenate),
    "Stack": stack,
    "Split": split,
    **dict.fromkeys(("SplitTensor", "SplitWithSize"), partial(split, index=2)),
    "StridedSlice": strided_slice,
    "StridedSliceGrad": strided_slice_grad,
    "Slice": slice_of,
    "Squeeze": squeeze,
    **dict.fromkeys(("Load", "StopGradient", "TensorMove"), unchanged),
    "ReverseV2": reversed_along,
}
