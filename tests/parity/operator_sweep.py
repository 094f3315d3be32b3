# SPDX-License-Identifier: Apache-2.0
"""Operators x layouts: forward and backward, by all ranks in one process, beside one device.

Each operator stands between parameters of its own, whose gradients are compared, and a loss that is not linear.
"""

import collections
import contextlib
import itertools
import math
import tempfile
import unittest.mock

import all_ranks
import mindspore as ms
import numpy as np
from all_ranks import drawn
from mindspore import Tensor, nn, ops
from operator_functions import ELEMENTWISE, FUNCTIONS, TAKES_TWO
from spmd_functions import COLUMNS, ROWS

from sporeloom.partition import propagate
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.mindir import read_graph
from sporeloom.partition.sharded_graph import PartitionError
from sporeloom.runtime.compiler import faster_compilation
from sporeloom.runtime.spmd.compile import compile_for_one_device

X = drawn(ROWS, COLUMNS, seed=0)
VALUES = {
    "shift": drawn(ROWS, COLUMNS, seed=1) * 0.3,
    "other": drawn(ROWS, COLUMNS, seed=2),
    "scale": drawn(COLUMNS, seed=3) * 0.2 + 1,
}
SCHEMES = {
    "dp2 rows": ({"dp": 2}, (("dp",), ()), {}),
    "tp2 columns": ({"tp": 2}, ((), ("tp",)), {"other": ((), ("tp",)), "scale": (("tp",),)}),
    "tp2 weights by row": ({"tp": 2}, ((), ()), {"shift": (("tp",), ()), "other": (("tp",), ())}),
    "rows and columns": ({"dp": 2, "tp": 2}, (("dp",), ("tp",)), {}),
    "rows, weights by column": (
        {"dp": 2, "tp": 2},
        (("dp",), ()),
        {"shift": ((), ("tp",)), "other": ((), ("tp",)), "scale": (("tp",),)},
    ),
    "rows, weights over both": (
        {"dp": 2, "tp": 2},
        (("dp",), ()),
        {"shift": (("dp", "tp"), ()), "other": (("tp", "dp"), ()), "scale": (("dp", "tp"),)},
    ),
    "columns over both, weights by row": (
        {"dp": 2, "tp": 2},
        ((), ("tp", "dp")),
        {"shift": (("dp",), ("tp",)), "other": (("dp",), ())},
    ),
    "the axes swapped": (
        {"dp": 2, "tp": 2},
        (("tp",), ("dp",)),
        {"shift": (("dp",), ("tp",)), "other": (("dp",), ("tp",)), "scale": (("dp",),)},
    ),
}
"""Degrees, dims of x, dims of parameters; these are replicated if they are not named."""
NAMES = list(FUNCTIONS)
ALIKE = {name for i, name in enumerate(ELEMENTWISE) if i % 3}
"""Two thirds of the elementwise operators, which share a handler."""


def grouped(names):
    """Functions that are compiled together."""
    return [names[i : i + 16] for i in range(0, len(names), 16)]


GROUPS = grouped(NAMES)
CLOSE = 1e-5
"""Of the largest entry of a tensor, or of 1."""


class Trained(nn.Cell):
    def __init__(self, name):
        super().__init__()
        self.function, self.takes_two = FUNCTIONS[name], name in TAKES_TWO
        self.shift, self.other, self.scale = (ms.Parameter(Tensor(v), name=n) for n, v in VALUES.items())

    def construct(self, x):
        x = (x + self.shift) * self.scale + self.other * 0.1
        y = self.function(x, self.other) if self.takes_two else self.function(x)
        return (y * y).sum() * 0.1 + (y * y * y).sum() * 0.01


class Several(nn.Cell):
    """Side by side. Gives the sum of the losses, and these."""

    def __init__(self, names):
        super().__init__()
        self.nets = nn.CellList([Trained(name) for name in names])

    def construct(self, x):
        losses = [net(x) for net in self.nets]
        return ops.addn(losses), ops.stack(losses)


class Step(nn.Cell):
    """All losses, and all gradients."""

    def __init__(self, names):
        super().__init__()
        self.net = Several(names)
        self.gradients = ms.value_and_grad(self.net, None, self.net.trainable_params(), has_aux=True)

    def construct(self, x):
        (_, losses), gradients = self.gradients(x)
        return losses, *gradients


def sweep(names, schemes, native=False):
    """{scheme: {name: [how far it is off, kinds of operators that every rank computes whole] or why it is refused}}.

    `native`: one device is MindSpore's own compilation, not the graph that is sharded.
    """
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    with tempfile.TemporaryDirectory() as folder:
        return _Sweep(names, folder, native).told(schemes)


def deterministic_part():
    """All but ALIKE, each group in one of the schemes in turn, then in those of two ranks, which take less time."""
    of_two = [scheme for scheme, (degrees, *_) in SCHEMES.items() if math.prod(degrees.values()) == 2]
    turns = itertools.chain(SCHEMES, itertools.cycle(of_two))
    outcomes = [sweep(group, [next(turns)]) for group in grouped([n for n in NAMES if n not in ALIKE])]
    return {"outcomes": outcomes, "close": CLOSE}


class _Sweep:
    def __init__(self, names, folder, native):
        self.names, self.folder, self.native = names, folder, native
        step = Step(names)
        self.values = {p.name: p.asnumpy() for p in step.net.trainable_params()}
        self.model = compile_for_one_device(step, [(X.shape, X.dtype)])
        if native:
            with faster_compilation():
                self.reference = [each.asnumpy() for each in Step(names)(Tensor(X))]
        else:
            self.reference = all_ranks.run_whole(self.model, self.values, [X], folder)

    def told(self, schemes):
        return {scheme: self.of(scheme) for scheme in schemes}

    def of(self, scheme):
        degrees, of_x, of_parameters = SCHEMES[scheme]
        grid = DeviceGrid(degrees)
        parameters = {name: of_parameters.get(name.rpartition(".")[2], ()) for name in self.values}
        parameters = {name: dims for name, dims in parameters.items() if dims}
        try:
            with computed_whole() as whole:
                merged, _ = all_ranks.sharded_model(self.model, grid, parameters, [of_x])
        except PartitionError as error:
            return self.refused(scheme, str(error))
        found = all_ranks.run(merged, grid, parameters, self.values, [X], self.folder)
        owners = self.owners({node.outputs[0] for node in whole})
        kinds = collections.defaultdict(set)
        for node in whole:
            kinds[owners.get(node.outputs[0])].add(node.kind)
        return {name: [self.off(i, found), sorted(kinds[i])] for i, name in enumerate(self.names)}

    def refused(self, scheme, message):
        """Of several each alone: one of them it is."""
        if len(self.names) == 1:
            return {self.names[0]: message}
        half = len(self.names) // 2
        parts = (self.names[:half], self.names[half:])
        return {k: v for part in parts for k, v in _Sweep(part, self.folder, self.native).of(scheme).items()}

    def off(self, place, found):
        """By how much the loss and gradients of an operator differ from one device's, at most, on any rank."""
        gradients = range(1 + place * len(VALUES), 1 + (place + 1) * len(VALUES))
        steepest = max(np.abs(self.reference[i]).max() for i in gradients)
        worst = 0.0
        for of_rank in found:
            loss, expected = of_rank[0][place], self.reference[0][place]
            worst = max(worst, abs(loss - expected) / max(abs(expected), 1.0))
            for i in gradients:
                scale = max(np.abs(self.reference[i]).max(), 0.01 * steepest)
                worst = max(worst, np.abs(of_rank[i] - self.reference[i]).max() / max(scale, 1e-6))
        return float(worst) if np.isfinite(worst) else float("inf")

    def owners(self, wanted):
        """Of values the number of the operator whose parameters they are made of."""
        graph, made_of = read_graph(self.model), {}
        for name in graph.parameters:
            made_of[name] = int(name.rpartition(":")[2].split(".")[2])
        for node in graph.nodes:
            known = [made_of[each] for each in node.flat_inputs() if each in made_of]
            made_of.update(dict.fromkeys(node.outputs, known[0]) if known else {})
        return {name: made_of.get(name) for name in wanted}


@contextlib.contextmanager
def computed_whole():
    """Nodes with a sharded input that every rank computes whole meanwhile."""
    found, original = [], propagate._Walk.compute_unsharded

    def recorded(walk, node, op):
        before = walk.result.unsharded[node.kind]
        original(walk, node, op)
        if walk.result.unsharded[node.kind] > before:
            found.append(node)

    with unittest.mock.patch.object(propagate._Walk, "compute_unsharded", recorded):
        yield found
