# SPDX-License-Identifier: Apache-2.0
"""Random small graphs of all kinds of operators, in random layouts on meshes of 2 to 8 ranks: every value of every rank's is
what one device computes.

Operators are given what others made, where shapes agree. What they are given anew is now and then a sum of whole numbers over
a dim that may be sharded: so sums are pending wherever they can be.
"""

import random as python_random

import numpy as np
import pytest
from graphs import Builder, check
from kinds import SAMPLES as SAMPLES_OF_KINDS
from kinds import Draw
from more_kinds import SAMPLES as SAMPLES_OF_MORE

from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import fitted

TRAINED = ("BatchNorm", "BatchNormGrad")  # are decomposed in graphs: see test_propagate
SAMPLES = {kind: s for kind, s in {**SAMPLES_OF_KINDS, **SAMPLES_OF_MORE}.items() if kind not in TRAINED}
MESHES = [
    {"dp": 2},
    {"dp": 2, "tp": 2},
    {"tp": 3},
    {"tp": 2, "dp": 3},
    {"dp": 4},
    {"dp": 2, "cp": 2, "tp": 2},
    {"dp": 3, "tp": 2},
    {"dp": 4, "tp": 2},
]
LAYOUTS = 6
"""Of each graph."""
EXACT = {
    *("Add", "Sub", "Neg", "Abs", "Mul", "Muls", "Square", "Maximum", "AddN", "MatMul", "BatchMatMul", "MatMulExt"),
    *("ReduceSum", "ReduceMax", "ReduceMin", "Transpose", "Reshape", "ExpandDims", "Squeeze", "BroadcastTo", "Tile"),
    *("Concat", "Stack", "Split", "StridedSlice", "Slice", "ReverseV2", "Gather", "UnsortedSegmentSum", "BiasAdd"),
    *("BiasAddGrad", "MaxPool", "GatherD", "GatherNd", "ScatterNd", "TensorScatterAdd", "Flatten", "Tril", "Conv2D"),
}
"""Make whole numbers of whole numbers, whoever adds them up."""
IN_STEPS = {
    *(
        "LessEqual",
        "FloorDiv",
        "Select",
        "TopK",
        "TopkExt",
        "Sort",
        "SortExt",
        "Argmax",
        "ArgMaxWithValue",
        "PReLUGrad",
    ),
    *("AdaptiveMaxPool2D", "MaxPoolGrad", "ReduceAny"),
}
"""Take another branch where a number is off by rounding: they are given whole numbers."""
OF_A_KIND = {
    **dict.fromkeys(("Div", "LayerNorm"), (1,)),
    **{"LayerNormGrad": (2, 3), "GroupNormGrad": (2, 3), "MaxPoolGrad": (0, 1), "RmsNormGrad": (2,)},
}
"""Inputs that are not just any numbers."""
LARGE = 100.0


class Chained(Draw):
    """Draws shapes of what is there."""

    def __init__(self, seed):
        super().__init__(seed)
        self.found = []

    def shape(self, least=1, most=4):
        fitting = [shape for shape in self.found if least <= len(shape) <= most]
        if fitting and self.random.random() < 0.8:
            return fitting[int(self.random.integers(len(fitting)))]
        return super().shape(least, min(most, max(least, 3)))


class RandomGraph:
    def __init__(self, seed, length=5):
        self.draw, self.random = Chained(seed), python_random.Random(seed)
        self.b, self.values, self.exact, self.outputs = Builder(), [], set(), []
        for _ in range(length):
            self.add(self.random.choice(list(SAMPLES)))
        self.update()

    def add(self, kind):
        arguments = SAMPLES[kind](self.draw)
        attributes = arguments.pop() if isinstance(arguments[-1], dict) else {}
        attributes |= {"axis": 1} if kind == "TensorScatterElements" else {}
        given = [self.given(kind, place, each) for place, each in enumerate(arguments)]
        self.b.node(kind, *given, **attributes)
        names = [name for each in given for name in (each if isinstance(each, tuple) else (each,))]
        is_exact = kind in EXACT and all(name in self.exact for name in names if isinstance(name, str))
        for name in self.b.graph.nodes[-1].outputs:
            self.keep(name, is_exact)
            self.outputs.append(name)

    def keep(self, name, is_exact):
        value = self.b.values[name]
        if np.asarray(value).dtype.kind == "f" and np.all(np.isfinite(value)) and np.abs(value).max(initial=0) < LARGE:
            self.values.append(name)
            self.draw.found.append(np.shape(value))
            if is_exact:
                self.exact.add(name)

    def given(self, kind, place, argument):
        """An input: a name, names, or what is known."""
        if isinstance(argument, tuple) and argument and isinstance(argument[0], np.ndarray):
            return tuple(self.given(kind, place, each) for each in argument)
        if not isinstance(argument, np.ndarray):
            return argument
        alike = [n for n in self.values if np.shape(self.b.values[n]) == argument.shape]
        if kind in IN_STEPS:
            alike = [n for n in alike if n in self.exact]
        if alike and argument.dtype.kind == "f" and place not in OF_A_KIND.get(kind, ()) and self.random.random() < 0.8:
            return self.random.choice(alike)
        return self.made(argument)

    def made(self, value):
        if value.dtype.kind != "f" or self.random.random() < 0.5:
            name = self.new(value)
        else:
            parts = self.draw.of(self.random.choice([4, 6, 12]), *value.shape)
            parts[-1] = value - parts[:-1].sum(0)
            name = self.b.node("ReduceSum", self.new(parts), (0,), False)
        self.keep(name, bool(np.all(value == np.rint(value))))
        return name

    def new(self, value):
        is_parameter = value.dtype.kind == "f" and self.random.random() < 0.4
        return self.b.tensor(f"x{len(self.b.values)}", value, is_parameter)

    def update(self):
        """Of a parameter by what has its shape, as an optimizer does."""
        shapes = {name: type.shape for name, type in self.b.graph.parameters.items()}
        pairs = [(p, v) for p in shapes for v in self.values if np.shape(self.b.values[v]) == shapes[p] and v != p]
        if pairs:
            parameter, value = self.random.choice(pairs)
            new = self.b.node("Sub", parameter, self.b.node("Muls", value, 0.5))
            self.outputs.append(self.b.node("Assign", parameter, new, side_effect_mem=True))

    def dims(self, shape, grid):
        """Of a value: each axis at random to a dim or to none, in random order."""
        axes = list(grid.degrees)
        self.random.shuffle(axes)
        wanted = [[] for _ in shape]
        for axis in axes:
            if shape and (place := self.random.randrange(-1, len(shape))) >= 0:
                wanted[place].append(axis)
        return fitted(wanted, shape, grid)

    def check(self, mesh):
        """Returns what it communicates."""
        grid = DeviceGrid(mesh)
        parameters = {name: self.dims(type.shape, grid) for name, type in self.b.graph.parameters.items()}
        inputs = {name: self.dims(type.shape, grid) for name, type in self.b.graph.inputs.items()}
        return check(self.b, self.outputs, grid, parameters, inputs).communications


def compare(seeds):
    """Graphs of these seeds in several layouts each; returns kinds of collectives that were met."""
    met = set()
    for seed in seeds:
        graph = RandomGraph(seed)
        for place in range(LAYOUTS):
            mesh = MESHES[(seed + place) % len(MESHES)]
            try:
                met |= {each.kind for each in graph.check(mesh)}
            except Exception as error:
                raise AssertionError(f"graph {seed} on {mesh}: {error}") from error
    return met


@pytest.mark.parametrize("part", range(4))
def test_every_rank_has_what_one_device_has(part):
    assert compare(range(part * 50, part * 50 + 50)) == {"AllReduce", "AllGather", "ReduceScatter", "AllToAll"}


@pytest.mark.parametrize("part", range(2))
def test_so_has_it_in_many_more(part):
    compare(range(1000 + part * 200, 1200 + part * 200))
