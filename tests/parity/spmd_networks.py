# SPDX-License-Identifier: Apache-2.0
"""Functions and networks whose training step is sharded by `sporeloom.partition`: every rank must see what one device sees.

A function is trained through the scales of its columns and a bias, so its gradient counts, too.
"""

import pickle
import re

import mindspore as ms
import numpy as np
import own_networks
import parts
from mindspore import Tensor, nn, ops
from spmd_functions import COLUMNS, FUNCTIONS, ROWS

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.partition.grid import DeviceGrid
from sporeloom.runtime.cpu.processes import CpuProcesses
from sporeloom.runtime.cpu.program import Program
from sporeloom.runtime.cpu.transport import Collectives
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.runtime.spmd.rank_graph import describe_inputs
from sporeloom.runtime.spmd.shard import Decisions, partition_for_rank
from sporeloom.strategy.loader import strategy_of

STEPS = 3
BATCH = (("dp",), ())
SCHEMES = {
    "rows": (BATCH, ()),
    "rows and columns": ((("dp",), ("tp",)), ()),
    "columns over all": (((), ("tp", "dp")), ()),
    "rows, parameters by row": (BATCH, ("tp",)),
    "rows over all, parameters too": ((("dp", "tp"), ()), ("dp", "tp")),
}
"""How inputs are sharded at once; axes that shard dim 0 of parameters of two and more dims."""


class Trained(nn.Cell):
    """The mean of the squares of what a function makes, and of their cubes."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        scale = np.random.default_rng(4).random(COLUMNS).astype(np.float32) + 0.5
        self.scale, self.bias = (ms.Parameter(Tensor(v), name=n) for v, n in ((scale, "scale"), (scale - 1, "bias")))

    def construct(self, x):
        y = self.function(x * self.scale + self.bias)
        return (y * y).mean() + (y * y * y).mean() * 0.1


class Several(nn.Cell):
    """Functions side by side, each with parameters of its own, in one graph. Gives the sum of the losses, and these."""

    def __init__(self, names):
        super().__init__()
        self.nets = nn.CellList([Trained(FUNCTIONS[name]) for name in names])

    def construct(self, x):
        losses = [net(x) for net in self.nets]
        return ops.addn(losses), ops.stack(losses)


class Step(nn.Cell):
    """Trains; gives every loss."""

    def __init__(self, net):
        super().__init__()
        weights = net.trainable_params()
        self.optimizer = nn.Momentum(weights, 0.05, 0.9, weight_decay=0.01)
        self.gradients = ms.value_and_grad(net, None, weights, has_aux=True)

    def construct(self, x):
        (_, losses), gradients = self.gradients(x)
        return ops.depend(losses, self.optimizer(gradients))


class Images(nn.Cell):
    """Convolutions, their norms and pools, then recurrent layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.depthwise = nn.Conv2d(2, 4, 3, has_bias=True), nn.Conv2d(4, 4, 3, group=4)
        self.norm, self.groups, self.back = (
            nn.BatchNorm2d(4),
            nn.GroupNorm(2, 4),
            nn.Conv2dTranspose(4, 4, 3, has_bias=True),
        )
        self.largest, self.mean, self.slope = nn.MaxPool2d(2, 2), nn.AvgPool2d(2, 2), nn.PReLU(4)
        self.conv1d, self.lstm, self.gru = (
            nn.Conv1d(4, 4, 3),
            nn.LSTM(4, 4, batch_first=True),
            nn.GRU(4, 4, batch_first=True),
        )
        self.row_norm, self.dense = nn.LayerNorm((4,)), nn.Dense(4, 2)

    def construct(self, x):
        x = self.groups(ops.relu(self.norm(self.depthwise(self.conv(x)))))
        x = self.slope(self.mean(self.largest(self.back(x)))).reshape(ROWS, 4, -1)
        x = self.conv1d(x).transpose(0, 2, 1)
        return (self.dense(self.row_norm(self.gru(self.lstm(x)[0])[0])) ** 2).mean()


def normal(*shape):
    return Tensor(np.random.default_rng(7).standard_normal(shape).astype(np.float32))


NETWORKS = {
    name: (own_networks.NETWORKS[name], lambda name=name: [Tensor(x) for x in own_networks.data(name)])
    for name in own_networks.NETWORKS
    if name != "plain"
}
NETWORKS |= {name: (make, lambda: [Tensor(parts.drawn(8, 6, seed=1))]) for name, (make, *_) in parts.CASES.items()}
NETWORKS["images"] = (Images, lambda: [normal(ROWS, 2, 8, 8)])


def trained(names):
    """A training step of functions, or of one network, and its inputs."""
    ms.set_seed(3)
    np.random.seed(3)
    if names[0] in FUNCTIONS:
        return Step(Several(names)).set_train(), [normal(ROWS, COLUMNS)]
    make, batch = NETWORKS[names[0]]
    net = make()
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9, weight_decay=0.01)
    return nn.TrainOneStepCell(net, optimizer).set_train(), batch()


def on_one_device(names, inputs):
    """What the first rank finds for all: losses and parameters without any mesh, and the graph."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    alone, _ = trained(names)
    losses = np.array([alone(*inputs).asnumpy() for _ in range(STEPS)])
    ms.set_context(mode=ms.GRAPH_MODE)
    model = compile_for_one_device(trained(names)[0], describe_inputs(inputs))
    parameters = {p.name: p.asnumpy() for p in alone.get_parameters()}
    return pickle.dumps((losses, parameters, model.SerializeToString()))


def compare(names, schemes):
    """Of this rank: {scheme: {name: how far it is off, relative where it is large}}, and kinds of operators that every rank
    computed whole; or why the graph is refused."""
    backend = CpuProcesses.join(strategy_of({"mesh": {"dp": 2, "tp": 2}}))
    _, inputs = trained(names)
    group = Collectives(backend.transport, range(4), "of one device")
    found = np.frombuffer(b"" if backend.rank else on_one_device(names, inputs), np.uint8)
    losses, parameters, model = pickle.loads(group.broadcast(found, 0).tobytes())
    model, told = mind_ir.ModelProto.FromString(model), {}
    for scheme in schemes:
        try:
            told[scheme] = compared(names, scheme, model, losses, parameters, inputs, backend)
        except ConfigError as error:
            told[scheme] = str(error)
    backend.close()
    return told


def compare_each(names, schemes):
    """By name of a network what `compare` tells of it alone."""
    return {name: compare([name], schemes) for name in names}


def compared(names, scheme, model, losses, parameters, inputs, backend):
    of_inputs, of_parameters = SCHEMES[scheme]
    grid = DeviceGrid({"dp": 2, "tp": 2})
    sharded = {
        p.name.rpartition(":")[2]: (of_parameters, *((),) * (len(p.dims) - 1))
        for p in model.graph.parameter
        if len(p.dims) > 1 and p.dims[0] % grid.degree(of_parameters) == 0
    }
    layouts = [of_inputs[: x.ndim] + ((),) * (x.ndim - 2) for x in inputs]
    graph, made = partition_for_rank(model, Decisions(grid, sharded, inputs=layouts), backend.rank)
    step, _ = trained(names)
    program = Program(graph, step, backend.transport, f"{names[0]}, {scheme}")
    found = np.array([program.run(inputs).asnumpy() for _ in range(STEPS)])
    of_losses = (np.abs(found - losses) / (1 + np.abs(losses))).reshape(STEPS, -1).max(0)
    worst = dict(zip(names, map(float, of_losses), strict=True))
    for mine in step.get_parameters():
        if layout := graph.layouts.get(mine.name):
            whole = parameters[mine.name]
            expected = whole[layout.stored_slice(whole.shape, backend.rank, {}).slices]
            off = float((np.abs(mine.asnumpy() - expected) / (1 + np.abs(expected))).max(initial=0))
            owner = re.search(r"nets\.(\d+)\.", mine.name)
            name = names[int(owner[1])] if owner else names[0]
            worst[name] = max(worst[name], off)
    return worst, dict(made.unsharded)
