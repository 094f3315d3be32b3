# SPDX-License-Identifier: Apache-2.0
"""A partitioner with one deliberate fault at a time, and who notices: the first step of training against one device, as a
certificate and `check=True` compare it."""

import contextlib
import unittest.mock
from dataclasses import replace

from first_steps import FirstSteps

from sporeloom.partition import decompositions, propagate, rank_mindir
from sporeloom.partition.faults import KINDS, Program, with_fault
from sporeloom.partition.graph import RankOffset
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import NONE, ValueLayout
from sporeloom.partition.operation import Operand
from sporeloom.partition.operators import HANDLERS, elementwise, losses, shapes, tables

FAULTS = {}
"""Name -> object, attributes (of HANDLERS kinds), and what makes the faulty one of the right one."""


def fault(name, owner, *attributes):
    def add(change):
        FAULTS[name] = (owner, attributes, change)
        return change

    return add


@contextlib.contextmanager
def planted(name):
    owner, attributes, change = FAULTS[name]
    with contextlib.ExitStack() as patches:
        if owner is HANDLERS:
            faulty = {kind: change(HANDLERS[kind]) for kind in attributes}
            patches.enter_context(unittest.mock.patch.dict(HANDLERS, faulty))
        else:
            (attribute,) = attributes
            patches.enter_context(unittest.mock.patch.object(owner, attribute, change(getattr(owner, attribute))))
        yield


# The program, of all ranks: what a certificate plants in one operator at a time, is planted here in all that it fits


def in_program(kind):
    def change(right):
        def begin(writer, sharded, model, grid, rank):
            faulty = with_fault(Program(sharded.graph, grid, rank), kind)
            right(writer, replace(sharded, graph=faulty), model, grid, rank)

        return begin

    return change


for each in KINDS:
    fault(each.name, rank_mindir._Writer, "__init__")(in_program(each))


@fault("axes of a dim in the order of the mesh, whatever the layout says", DeviceGrid, "runs")
def one_run(_):
    return lambda grid, axes: [grid.in_order(axes)] if axes else []


@fault("the index of a rank with its axes swapped", DeviceGrid, "index")
def swapped_index(right):
    return lambda grid, rank, axes: right(grid, rank, tuple(axes)[::-1])


@fault("an all-to-all that gathers and shards the wrong dims", rank_mindir._Writer, "collective")
def swapped_dims(right):
    def collective(writer, node):
        if node.kind == "AllToAll":
            a = node.attributes
            node = replace(node, attributes={**a, "dim": a["to_dim"], "to_dim": a["dim"]})
        right(writer, node)

    return collective


@fault("parts are gathered, and scattered, along dim 0 whatever the dim", rank_mindir._Writer, "along_first_dim")
def wrong_dim(_):
    def along_first_dim(writer, node, given, before, after, group, count):
        attributes = {"group": group, "rank_size": count, **({"op": "sum"} if node.kind == "ReduceScatter" else {})}
        rows = before.shape[0] * count if node.kind == "AllGather" else before.shape[0] // count
        done = writer.operator(node.kind, [given], replace(after, shape=(rows, *before.shape[1:])), **attributes)
        return writer.operator("Reshape", [done, writer.numbers(after.shape)], after)

    return along_first_dim


# What is held


@fault("a stale copy of an updated parameter", propagate._Walk, "visit")
def stale_copies(right):
    def visit(walk, node):
        names = [name for name in node.flat_inputs() if node.attributes.get("side_effect_mem")]
        before = {name: dict(walk.values[name].copies) for name in names}
        right(walk, node)
        for name, copies in before.items():
            walk.values[name].copies.update(copies)

    return visit


@fault("a copy is taken for one in which another sum is pending", propagate._Walk, "laid_out")
def wrong_copy(right):
    def laid_out(walk, name, wanted):
        value = walk.values[name]
        if value.layout is not None and wanted is not None:
            for layout, copy in {value.layout: value.name, **value.copies}.items():
                if layout.dims == wanted.dims:
                    return copy
        return right(walk, name, wanted)

    return laid_out


@fault("a copy is taken for one that is sharded otherwise, of the same shape", propagate._Walk, "laid_out")
def wrong_shards(right):
    def laid_out(walk, name, wanted):
        value = walk.values[name]
        if value.type is not None and wanted is not None:
            shape = wanted.local_shape(value.type.shape, walk.grid)
            for layout, copy in value.copies.items():
                if layout.partial == wanted.partial and layout.local_shape(value.type.shape, walk.grid) == shape:
                    return copy
        return right(walk, name, wanted)

    return laid_out


@fault("a value that an update wants sharded counts as added up", propagate._Walk, "lay_out")
def never_reduced(right):
    def lay_out(walk, name, wanted):
        value = walk.values[name]
        if value.layout is not None and value.layout.partial and not wanted.partial:
            value = replace(value, layout=ValueLayout(value.layout.dims))
            walk.values[name] = value
        right(walk, name, wanted)

    return lay_out


@fault("items of a sum with different sums pending are added as they are", propagate._Walk, "add_up")
def mixed_items(right):
    def add_up(walk, node):
        (items,) = node.inputs
        pending = NONE.union(*(walk.values[name].layout.partial for name in items))
        for name in items:
            value = walk.values[name]
            if not pending & value.layout.axes:
                walk.values[name] = replace(value, layout=ValueLayout(value.layout.dims, pending))
        right(walk, node)

    return add_up


# Handlers


def keeping(handler):
    """What is pending in the first tensor stays so, though the operator is not linear."""

    def plan(op):
        found = handler(op)
        x = op.tensor(0)
        kept = x.partial - frozenset(
            a for y in (*found.inputs, *found.outputs) for d in (y.dims if y else ()) for a in d
        )
        inputs = (ValueLayout(found.inputs[0].dims, kept), *found.inputs[1:])
        return replace(
            found, inputs=inputs, outputs=tuple(ValueLayout(y.dims, y.partial | kept) for y in found.outputs)
        )

    return plan


def nothing_pending(handler, first=0):
    """What comes out counts as added up."""

    def plan(op):
        found = handler(op)
        outputs = [y.reduced() if y and i >= first else y for i, y in enumerate(found.outputs)]
        return replace(found, outputs=tuple(outputs))

    return plan


def never_rewritten(handler):
    return lambda op: replace(handler(op), rewrite=None)


fault("a sum is taken after Square", HANDLERS, "Square")(keeping)
fault("a sum is taken after Tanh", HANDLERS, "Tanh")(keeping)
fault("a sum is taken after Exp", HANDLERS, "Exp")(keeping)
fault("a sum is taken after Div, of what it divides by", HANDLERS, "Div", "RealDiv")(
    lambda _: lambda op: elementwise.linear_in_one(op)
)
fault(
    "a product of rows of a sharded sum is not pending",
    HANDLERS,
    "MatMul",
    "MatMulExt",
    "BatchMatMul",
    "BatchMatMulExt",
)(nothing_pending)
fault("a sum over a sharded dim is not pending", HANDLERS, "ReduceSum", "SumExt")(nothing_pending)
fault("the mean of a rank's own rows", HANDLERS, "ReduceMean", "MeanExt")(lambda h: nothing_pending(never_rewritten(h)))
fault("a mean that is divided by the local count alone", HANDLERS, "ReduceMean", "MeanExt")(never_rewritten)
fault("the maximum of a rank's own part", HANDLERS, "ReduceMax", "AmaxExt")(never_rewritten)
fault("the gradient of a norm's scale is not pending", HANDLERS, "LayerNormGrad")(lambda h: nothing_pending(h, 1))
fault("rows added up by segment are not pending", HANDLERS, "UnsortedSegmentSum")(
    lambda h: lambda op: replace(nothing_pending(h)(op), remake=None)
)
fault("rows looked up on their own rank are not pending", HANDLERS, "Gather")(nothing_pending)
fault("the gradient of a kernel is not pending", HANDLERS, "Conv2DBackpropFilter")(nothing_pending)
fault("a sum over sharded channels is not pending", HANDLERS, "Conv2D")(nothing_pending)
fault("a softmax of a rank's own part", HANDLERS, "Softmax")(
    lambda _: lambda op: elementwise.aligned(op) if op.tensor(0).layout else None
)
fault("a cumulative sum of a rank's own rows", HANDLERS, "CumSum", "CumsumExt")(
    lambda h: (
        lambda op: replace(
            h(op), inputs=(ValueLayout(op.tensor(0).dims), *h(op).inputs[1:]), outputs=(ValueLayout(op.tensor(0).dims),)
        )
    )
)
fault("the mean of losses of a rank's own rows", losses, "_scaled")(lambda _: lambda *_given: None)


@fault("a bias is added on every rank", HANDLERS, "Add")
def added_by_all(_):
    def plan(op):
        operands = [o for o in op.operands if isinstance(o, Operand) and o.type]
        pending = NONE.union(*(o.partial for o in operands))
        sharding = frozenset(a for o in operands for d in o.dims for a in d)
        found = elementwise.aligned(op, pending - sharding)
        return replace(
            found,
            inputs=tuple(
                ValueLayout(y.dims, o.partial & (pending - sharding))
                for y, o in zip(found.inputs, operands, strict=True)
            ),
        )

    return plan


@fault("a product of two sums that are both pending stays so", HANDLERS, "Mul")
def both_pending(_):
    def plan(op):
        operands = [o for o in op.operands if isinstance(o, Operand) and o.type]
        sharding = frozenset(a for o in operands for d in o.dims for a in d)
        return elementwise.aligned(op, NONE.union(*(o.partial for o in operands)) - sharding)

    return plan


@fault("a sum loses what was pending before", HANDLERS, "ReduceSum", "SumExt")
def forgets_pending(right):
    def plan(op):
        found, x = right(op), op.tensor(0)
        over = found.outputs[0].partial - x.partial
        return replace(found, outputs=(ValueLayout(found.outputs[0].dims, over),))

    return plan


@fault("a slice of rows is taken of each rank's own", shapes, "_taken_whole")
def takes_all(right):
    return lambda *given: None if right(*given) is None else [True] * len(right(*given))


@fault("shards of a reshaped dim stay where they are though they are not contiguous", HANDLERS, "Reshape", "View")
def not_contiguous(right):
    def plan(op):
        every_axis = lambda op, dims: [axis for _, axes in dims for axis in axes]  # noqa: E731
        with unittest.mock.patch.object(shapes, "_contiguous", every_axis):
            found, x = right(op), op.tensor(0)
        as_it_was = ValueLayout(x.dims, x.partial)
        return (
            replace(found, inputs=(as_it_was, *found.inputs[1:]))
            if found.outputs[0].axes == as_it_was.axes
            else right(op)
        )

    return plan


@fault("rows are put together on each rank", shapes, "_joined")
def joined_on_each(right):
    return lambda op, items, free: right(op, items, None)


@fault("a rank's own segments count from the first of all", tables, "_own_segments")
def segments_of_all(right):
    def own(op, of_ids, made, emit, inputs, wanted):
        with unittest.mock.patch.object(tables, "RankOffset", lambda axes, stride: RankOffset(axes, 0)):
            return right(op, of_ids, made, emit, inputs, wanted)

    return own


@fault("rows of a table that are looked up are one off", tables, "_own_rows")
def one_row_off(right):
    def own(*given):
        with unittest.mock.patch.object(tables, "RankOffset", lambda axes, stride: RankOffset(axes, stride + 1)):
            return right(*given)

    return own


@fault("columns of one-hot rows count from the first of all", tables, "_own_columns")
def columns_of_all(right):
    def own(*given):
        with unittest.mock.patch.object(tables, "RankOffset", lambda axes, stride: RankOffset(axes, 0)):
            return right(*given)

    return own


@fault("statistics of a batch are of a rank's own rows", decompositions, "_mean")
def own_rows(right):
    def mean(b, x):
        pending = {**HANDLERS}
        faulty = {kind: nothing_pending(never_rewritten(pending[kind])) for kind in ("ReduceMean",)}
        with unittest.mock.patch.dict(HANDLERS, faulty):
            return right(b, x)

    return mean


@fault("dims of a transposed value stay where they were", HANDLERS, "Transpose")
def not_transposed(right):
    def plan(op):
        found, x = right(op), op.tensor(0)
        dims = op.fit(x.dims, op.output.shape)
        return replace(found, outputs=(ValueLayout(dims, x.partial),))

    return plan


def noticed(names):
    """By a certificate and by `check=True`: without any fault, then with each."""
    first_steps, told = FirstSteps(), []
    for name in (None, *names):
        with planted(name) if name else contextlib.nullcontext():
            found = first_steps.differences().values()
        told.append([any(of[who] for of in found) for who in ("certificate", "check")])
    return told
