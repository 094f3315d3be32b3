# SPDX-License-Identifier: Apache-2.0
"""Every handler, on random inputs in random layouts over random grids, with sums pending too: what the ranks compute together
is what one device computes."""

import numpy as np
import pytest
from kinds import COMPUTE as KINDS
from kinds import SAMPLES as SAMPLES_OF_KINDS
from kinds import Draw
from more_kinds import COMPUTE as MORE_KINDS
from more_kinds import SAMPLES as SAMPLES_OF_MORE
from ranks import communicated, gathered, redistributed, spread

from sporeloom.partition.graph import RankOffset, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout, fitted
from sporeloom.partition.operation import Operand, Operation
from sporeloom.partition.operators import HANDLERS, plan
from sporeloom.partition.redistribute import redistribution

COMPUTE, SAMPLES = {**KINDS, **MORE_KINDS}, {**SAMPLES_OF_KINDS, **SAMPLES_OF_MORE}
GRIDS = [{"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 3}, {"dp": 2, "cp": 2, "tp": 2}]
MORE_GRIDS = [*GRIDS, {"tp": 3}, {"dp": 4}, {"dp": 3, "tp": 2}, {"dp": 4, "tp": 2}, {"tp": 8}]
CASES, MANY = 100, 120
REMADE = []
ATTRIBUTES = {"TensorScatterElements": {"axis": 1}}


def is_tensor(value):
    return isinstance(value, np.ndarray)


def random_layout(value, grid, random, may_be_pending):
    axes = list(random.permutation(list(grid.degrees)))
    dims, pending = [[] for _ in value.shape], set()
    for axis in axes:
        place = int(random.integers(-1, value.ndim + 1))
        if place == value.ndim:
            if may_be_pending and value.dtype.kind == "f":
                pending.add(str(axis))
        elif place >= 0:
            dims[place].append(str(axis))
    return ValueLayout(fitted(dims, value.shape, grid), frozenset(pending))


class Ranks:
    """Computes what a handler emits, on all ranks at once; a name stands for what each rank holds."""

    def __init__(self, grid, kind, attributes):
        self.grid, self.kind, self.attributes, self.held = grid, kind, attributes, {}

    def keep(self, held):
        name = f"v{len(self.held)}"
        self.held[name] = held
        return name

    def constant(self, value, type=None):
        if isinstance(value, RankOffset):
            return self.keep([self.grid.index(rank, value.axes) * value.stride for rank in range(self.grid.size)])
        return self.keep([value] * self.grid.size)

    def values(self, name, rank):
        return tuple(self.held[n][rank] for n in name) if isinstance(name, tuple) else self.held[name][rank]

    def operator(self, inputs, types):
        return self.node(self.kind, inputs, types, self.attributes)

    def node(self, kind, inputs, types, attributes=None):
        if kind == "AllReduce":
            held = communicated("all_reduce", self.held[inputs[0]], attributes["axes"], self.grid, op=attributes["op"])
            return (self.keep(held),)
        if kind == "SliceOfRank":
            return (
                self.keep(
                    communicated("slice", self.held[inputs[0]], attributes["axes"], self.grid, attributes["dim"])
                ),
            )
        results = []
        for rank in range(self.grid.size):
            result = COMPUTE[kind](*(self.values(name, rank) for name in inputs), **(attributes or {}))
            results.append(result if isinstance(result, tuple) else (result,))
        for of_rank in results:
            for each, type in zip(of_rank, types, strict=True):
                assert np.shape(each) == type.shape, (kind, np.shape(each), type)
        return tuple(self.keep([np.asarray(r[i]) for r in results]) for i in range(len(types)))


def check(kind, arguments, grid, random):
    """Returns how the ranks computed it."""
    attributes = arguments.pop() if isinstance(arguments[-1], dict) else {}
    expected = COMPUTE[kind](*arguments, **attributes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    types = tuple(TensorType(np.shape(e), str(np.asarray(e).dtype)) for e in expected)
    given, operands = [], []

    def operand(value):
        if not is_tensor(value):
            return Operand(None, None, value, True), None
        layout = random_layout(value, grid, random, may_be_pending=True)
        return Operand(TensorType(value.shape, str(value.dtype)), layout), spread(value, layout, grid, random)

    for value in arguments:
        if isinstance(value, tuple) and value and is_tensor(value[0]):
            pairs = [operand(v) for v in value]
            operands.append(tuple(o for o, _ in pairs))
            given.append(tuple(h for _, h in pairs))
        else:
            o, held = operand(value)
            operands.append(o)
            given.append(held)
    op = Operation(kind, tuple(operands), types, {**ATTRIBUTES.get(kind, {}), **attributes}, grid)
    found = plan(op)
    assert found is not None
    ranks = Ranks(grid, kind, attributes)

    def moved(o, held, wanted):
        return ranks.keep(redistributed(held, redistribution(o.layout, wanted, grid), grid))

    names = []
    for i, (o, held, wanted, value) in enumerate(zip(operands, given, found.inputs, arguments, strict=True)):
        if i in found.constants:
            names.append(ranks.constant(found.constants[i]))
        elif isinstance(o, tuple):
            names.append(tuple(moved(*each) for each in zip(o, held, wanted, strict=True)))
        else:
            names.append(ranks.constant(value) if o.type is None else moved(o, held, wanted))
    local = [TensorType(y.local_shape(t.shape, grid), t.dtype) for y, t in zip(found.outputs, types, strict=True)]
    outputs = found.rewrite(ranks, names) if found.rewrite else ranks.operator(names, local)
    for name, layout, value in zip(outputs, found.outputs, expected, strict=True):
        got = gathered_close(ranks.held[name], layout, grid)
        np.testing.assert_allclose(got, value, rtol=1e-9, atol=1e-9, err_msg=f"{kind} {operands} -> {found}")
    if found.remake:
        check_remade(found, ranks, names, expected[0], random)
    return found


def check_remade(found, ranks, names, expected, random):
    """The output sharded further, made at once: right, or not made at all."""
    (layout,), grid = found.outputs, ranks.grid
    dim = int(random.integers(expected.ndim))
    summed = layout.partial if random.integers(2) else frozenset()  # or added up where it is sharded
    free = [axis for axis in grid.degrees if axis not in layout.axes | (layout.partial - summed)]
    dims = [(*axes, *free) if i == dim else axes for i, axes in enumerate(layout.dims)]
    wanted = ValueLayout(fitted(dims, expected.shape, grid), layout.partial - summed)
    name = found.remake(ranks, names, wanted)
    if name is not None:
        assert wanted != layout
        np.testing.assert_allclose(gathered_close(ranks.held[name], wanted, grid), expected, rtol=1e-9, atol=1e-9)
        REMADE.append(wanted)


def gathered_close(held, layout, grid):
    """As `gathered`, of floats: replicas agree but for rounding, for they compute the same."""
    held = [np.asarray(h).astype(np.float64) for h in held]
    return gathered(held, layout, grid)


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_ranks_compute_what_one_device_does(kind):
    seed = sum(map(ord, kind))
    draw, random, sharded = Draw(seed), np.random.default_rng(seed), 0
    for case in range(CASES):
        found = check(kind, SAMPLES[kind](draw), DeviceGrid(GRIDS[case % len(GRIDS)]), random)
        layouts = [*found.outputs, *(y for x in found.inputs for y in (x if isinstance(x, tuple) else (x,)))]
        sharded += any(layout is not None and not layout.is_replicated for layout in layouts)
    assert sharded > CASES // 25, f"anything was sharded in {sharded} of {CASES} cases only"


CHUNKS = 12


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_ranks_compute_so_of_many_more(chunk):
    """The kinds in turn, from the one of that number on; each on 120 random inputs and layouts."""
    for kind in list(SAMPLES)[chunk::CHUNKS]:
        seed = sum(map(ord, kind)) + 1000
        draw, random = Draw(seed), np.random.default_rng(seed)
        for case in range(MANY):
            check(kind, SAMPLES[kind](draw), DeviceGrid(MORE_GRIDS[case % len(MORE_GRIDS)]), random)


@pytest.mark.parametrize("group", [1, 2])
def test_gradients_of_convolutions_are_their_adjoints(group):
    """<conv(x, w), dy> = <x, its gradient> = <w, its gradient>, for a convolution is linear in both."""
    random = np.random.default_rng(group)
    x, w, dy = (random.standard_normal(shape) for shape in ((2, 4, 5, 3), (6, 4 // group, 3, 1), (2, 6, 5, 3)))
    product = (COMPUTE["Conv2D"](x, w, group=group) * dy).sum()
    of_x = COMPUTE["Conv2DBackpropInput"](dy, w, x.shape, group=group)
    of_w = COMPUTE["Conv2DBackpropFilter"](dy, x, w.shape, group=group)
    np.testing.assert_allclose([(of_x * x).sum(), (of_w * w).sum()], product)


@pytest.mark.parametrize(
    ("index", "value"), [(6, None), (7, (1, 2)), (10, 3), (11, 0.9), (13, 1), (14, 1), (16, 2), (17, 2)]
)
def test_flash_attention_in_another_form_is_computed_unsharded(index, value):
    """No mask, a prefix, heads in another dim, dropout, windows, another layout, another mode."""
    grid, shape = DeviceGrid({"dp": 2}), (4, 4, 4, 2)
    tensors = [np.zeros(shape)] * 3 + [None] * 3 + [np.zeros((4, 1, 4, 4), np.uint8)] + [None] * 3
    arguments = [*tensors, 4, 1.0, 0.5, 2**31 - 1, 2**31 - 1, 0, 1, 0]

    def planned(arguments):
        operands = [
            Operand(TensorType(x.shape, str(x.dtype)), ValueLayout((("dp",), (), (), ())))
            if is_tensor(x)
            else Operand(None, None, x, True)
            for x in arguments
        ]
        types = [TensorType((4, 4, 4, 8), "float64")] * 2 + [TensorType((1,), "float64"), TensorType(shape, "float64")]
        return plan(Operation("FlashAttentionScore", tuple(operands), tuple(types), {}, grid))

    assert planned(arguments).outputs[3].dims[0] == ("dp",)
    assert planned([*arguments[:index], value, *arguments[index + 1 :]]) is None


@pytest.mark.parametrize("kind", ["OneHot", "UnsortedSegmentSum"])
def test_what_is_wanted_sharded_is_made_so(kind):
    REMADE.clear()
    draw, random = Draw(1), np.random.default_rng(1)
    for case in range(CASES):
        check(kind, SAMPLES[kind](draw), DeviceGrid(GRIDS[case % len(GRIDS)]), random)
    assert len(REMADE) > CASES // 25


def test_every_kind_with_a_handler_of_its_own_is_tried():
    """Kinds that share a handler with one that is tried need no case; those that have one alone do."""
    tried = {str(HANDLERS[kind]) for kind in SAMPLES}
    alone = {kind for kind in HANDLERS if str(HANDLERS[kind]) not in tried}
    by_networks = {"LSTM", "LSTMGrad", "CTCLossV2", "CTCLossV2Grad"}  # `speech` of tests/parity/user_networks.py
    by_hand = {"Cast", "GroupedMatmulV4"}  # NumPy has no bfloat16: test_propagate.py; test_grouped_product.py
    assert alone == by_networks | by_hand


@pytest.mark.parametrize(
    ("kind", "shapes", "known", "attributes"),
    [
        ("AdaptiveAvgPool2D", [(4, 8, 8)], [], {}),  # channels, height, width: no rows
        ("MaxPool", [(4, 8, 8, 4)], [], {"format": "NHWC"}),
        ("BatchNorm", [(8, 4, 2, 2), (4,), (4,), (4,), (4,)], [True], {}),
        ("BatchNormGrad", [(8, 4, 2, 2), (8, 4, 2, 2), (4,), (4,), (4,), (4,)], [True], {}),
        ("BiasAdd", [(4, 8, 8), (8,)], [1], {}),
        ("Argmax", [(4, 8)], [None], {}),
        ("Add", [(-1, 8), (8,)], [], {}),  # as long as values say
        ("Reshape", [(4, -1)], [(-1,)], {}),
        ("KLDivLoss", [(4, 8), (4, 8)], [], {"reduction": "batchmean"}),
    ],
)
def test_what_a_handler_does_not_know_is_computed_unsharded(kind, shapes, known, attributes):
    """These take the same inputs for something else."""
    grid = DeviceGrid({"dp": 2, "tp": 2})
    layout = lambda shape: ValueLayout(fitted([("dp",), ("tp",), (), ()][: len(shape)], shape, grid))  # noqa: E731
    operands = [Operand(TensorType(shape, "float32"), layout(shape)) for shape in shapes]
    operands += [Operand(None, None, value, True) for value in known]
    op = Operation(kind, tuple(operands), (TensorType(shapes[0], "float32"),), attributes, grid)
    assert plan(op) is None


def test_the_gradient_of_an_lstm_takes_the_rows_that_the_forward_operator_had():
    """What that keeps has an order of its own, so no rank can use another's."""
    grid, real = DeviceGrid({"dp": 2}), "float32"
    rows, states, weights, kept = (6, 4, 3), (1, 4, 5), (200, 1, 1), (1, 1)
    by_row = ValueLayout(((), ("dp",), ()))

    def operand(shape, layout=None):
        return Operand(TensorType(shape, real), layout or ValueLayout(((),) * len(shape)))

    types = tuple(TensorType(shape, real) for shape in ((6, 4, 5), states, states, kept, kept))
    given = (operand(rows, by_row), operand(states), operand(states), operand(weights))
    forward = plan(Operation("LSTM", given, types, {}, grid))
    assert forward.inputs == (by_row, by_row, by_row, ValueLayout(((), (), ()))) and forward.outputs[0] == by_row
    types = tuple(TensorType(shape, real) for shape in (rows, states, states, weights))
    given = (*map(operand, (rows, states, states, weights, (6, 4, 5), *(states,) * 2, (6, 4, 5), *(states,) * 2)),)
    backward = plan(Operation("LSTMGrad", (*given, operand(kept, forward.outputs[3])), types, {}, grid))
    assert {layout for i, layout in enumerate(backward.inputs[:10]) if i != 3} == {by_row}
    assert backward.inputs[10] == forward.outputs[3]
    assert backward.outputs == (by_row, by_row, by_row, ValueLayout(((), (), ()), frozenset({"dp"})))
