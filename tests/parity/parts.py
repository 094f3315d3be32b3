# SPDX-License-Identifier: Apache-2.0
"""Networks that are another function on a part of their input, or whose gradients MindSpore's compiler rewrites."""

import contextlib
import functools

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from planted_faults import planted

from sporeloom import auto_parallel
from sporeloom.core.errors import ConfigError
from sporeloom.runtime import auto_parallel as module
from sporeloom.runtime.environment import launched_processes, launched_rank

STEPS = 3
COLUMNS_THEN_ROWS = {"up": [["dp", None], ["tp", None]], "down": [["dp", "tp"], [None, "tp"]]}
DP, TP = {"mesh": {"dp": 2}}, {"mesh": {"tp": 2}, "rules": COLUMNS_THEN_ROWS}
COLUMNS = {"mesh": {"tp": 2}, "rules": {"matmul": [[None, None], ["tp", None]]}}


def drawn(*shape, seed=5):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


class Rows(nn.Cell):
    """`function` of (8, 4): rows or columns are sharded; one mean and one product over all."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.matmul = ms.Parameter(Tensor(drawn(4, 6) * 0.4)), ops.MatMul(False, True)
        self.function = function

    def construct(self, x):
        out = self.function(self.matmul(x, self.weight))
        return (out * out * out).sum() * 0.1 + (out * out).mean()


class RowParallel(nn.Cell):
    """`function` of what two ranks add up."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = ms.Parameter(Tensor(drawn(16, 6) * 0.3)), ms.Parameter(Tensor(drawn(4, 16) * 0.3))
        self.gain = ms.Parameter(Tensor(np.ones(4, np.float32)), name="gain")
        self.up, self.down, self.add_n = ops.MatMul(False, True), ops.MatMul(False, True), ops.AddN()
        self.function = function

    def construct(self, x):
        return self.function(self, self.down(ops.tanh(self.up(x, self.first)), self.second))


def cube(_, d):
    return (d * d * d).mean()


def written_out_gelu(_, d):
    return (d * 0.5 * (1 + ops.tanh(0.79788 * (d + 0.044715 * d * d * d)))).sum()


def rms_norm(net, d):
    y = d * ops.rsqrt((d * d).mean(-1, keep_dims=True) + 1e-6) * net.gain
    return (y**3).mean()


def residual(_, d):
    return ((d * 2.0 + d * d) ** 2).mean()


def addn(net, d):
    return (ops.addn([d * net.gain, ops.sin(d) * 0.3]) ** 2).mean()


def held_add_n(net, d):
    return (net.add_n([d * net.gain, ops.sin(d) * 0.3]) ** 2).mean()


def made_add_n(net, d):
    return (ops.AddN()([d * net.gain, ops.sin(d) * 0.3]) ** 2).mean()


def made_add_n_of_three(net, d):
    return (ops.AddN()([ops.AddN()([d * net.gain, ops.sin(d) * 0.3]), d]) ** 2).mean()


def cubed_sum(h):
    total = h.sum(0)
    return total * total * total * 0.3


def argmax_of_rows(h):
    return h.argmax(0).astype(ms.float32) * h[0] * 0.1


def argmax_of_columns(h):
    return h.argmax(1).astype(ms.float32) * h[:, 0] * 0.1


def argmin_with_value(h):
    return ops.ArgMinWithValue(0)(h)[0].astype(ms.float32) * h[0] * 0.1


def amax_of_rows(h):
    return ops.amax(h, 0)


def logcumsumexp(h):
    return ops.logcumsumexp(h, 0)


def batch_norm_by_what_is_given(h):
    return ops.batch_norm(h, MEAN, VARIANCE, VARIANCE, MEAN, training=False)


def variance(h):
    return ops.var(h, 0)


def one_norm(h):
    return ops.norm(h, 1, 0)


def median(h):
    return ops.median(h, 0)[0]


def segment_max(h):
    return ops.unsorted_segment_max(h, SEGMENTS, 3)


def segment_sum(h):
    return ops.unsorted_segment_sum(h, SEGMENTS, 3)


def scatter(h):
    return ops.tensor_scatter_add(h, PLACES, ADDED)


def scatter_min(h):
    return ops.tensor_scatter_min(h, PLACES, ADDED)


def largest_rows(h):
    return ops.gather(h, ops.topk((h * h).sum(1), 3)[1], 0)


def divergence(h):
    return ops.kl_div(ops.log_softmax(h, 1), TARGETS, reduction="sum")


def as_many_as_are_positive(h):
    return ops.masked_select(h, h > 0)


ROWS = Tensor(0, ms.int32)
MEAN, VARIANCE = Tensor(np.zeros(4, np.float32)), Tensor(np.ones(4, np.float32))
SEGMENTS = Tensor(np.array([0, 1, 2, 0, 0, 1, 2, 1], np.int32))
PLACES, ADDED = Tensor(np.array([[6], [1], [3]], np.int32)), Tensor(drawn(3, 4, seed=7))
TARGETS = Tensor(np.full((8, 4), 0.25, np.float32))


class Kept(Rows):
    """Holds an operator that a rule keeps whole, as the refusal says."""

    def __init__(self, kind):
        super().__init__(kind)
        self.kind = kind
        self.largest, self.summed, self.added = ops.Argmax(0), ops.CumulativeLogsumexp(), ops.TensorScatterAdd()

    def construct(self, x):
        h = self.matmul(x, self.weight)
        if self.kind == "largest":
            return (self.largest(h).astype(ms.float32) * h[0] * h[0]).mean()
        if self.kind == "summed":
            return (self.summed(h, ROWS) ** 2).mean()
        return (self.added(h, PLACES, ADDED) ** 2).mean()


class Normed(Rows):
    """Normalizes by the rows that it is given."""

    def __init__(self):
        super().__init__(None)
        self.norm, self.gain = ops.BatchNorm(is_training=True), ms.Parameter(Tensor(np.ones(4, np.float32)))
        self.shift, self.mean = (ms.Parameter(Tensor(np.zeros(4, np.float32)), name=name) for name in ("shift", "mean"))
        self.variance = ms.Parameter(Tensor(np.ones(4, np.float32)), name="variance", requires_grad=False)

    def construct(self, x):
        h = self.norm(self.matmul(x, self.weight), self.gain, self.shift, self.mean, self.variance)[0]
        return (h * h * h * x[:, :4]).mean()


KEPT = {"largest": [[None, None]], "summed": [[None, None], []], "added": [[None, None]] * 3}


class ThroughSign(nn.Cell):
    """Its gradient is that of each entry."""

    def construct(self, x):
        return ops.sign(x)

    def bprop(self, x, out, dout):
        return (dout * (ops.abs(x) < 1).astype(ms.float32),)


class CentredGradient(nn.Cell):
    """Its gradient has a mean over the batch."""

    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, dout):
        return (dout - dout.mean(0),)


class MeanGradient(nn.Cell):
    """Its gradient counts the rows."""

    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, dout):
        return (dout / x.shape[0],)


class WithGradient(Rows):
    def __init__(self, cell):
        super().__init__(cell)
        self.own = cell

    def construct(self, x):
        h = self.matmul(x, self.weight)
        return (self.own(h) * h * h).mean()


class Clipping(nn.TrainOneStepCell):
    """Clips by the norm of all gradients, by hand."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        gradients, square, clipped = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss)), 0.0, ()
        for each in gradients:
            square = square + (each * each).sum()
        for each in gradients:
            clipped = (*clipped, each * (0.1 / ops.maximum(ops.sqrt(square), 0.1)))
        return ops.depend(loss, self.optimizer(clipped))


def plain(net):
    return nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.01)).set_train()


def clipped(net, optimizer):
    return Clipping(net, optimizer(net.trainable_params(), weight_decay=0.1)).set_train()


def by_value_and_grad(net):
    weights, optimizer = net.trainable_params(), nn.SGD(net.trainable_params(), 0.01)
    gradients = ms.value_and_grad(net.set_train(), None, weights)

    def step(*batch):
        loss, found = gradients(*batch)
        optimizer(found)
        return loss

    return step


def evaluated_first(net):
    step = nn.TrainOneStepCell(net, nn.Adam(net.trainable_params(), 0.01))

    def evaluate_and_step(*batch):
        net.set_train(False)(*batch)
        return step.set_train()(*batch)

    return evaluate_and_step


MOMENTUM = functools.partial(nn.Momentum, learning_rate=0.1, momentum=0.9)
ADAM = functools.partial(nn.Adam, learning_rate=0.01)
OF_SUMS = (cube, written_out_gelu, rms_norm, residual, addn, held_add_n, made_add_n, made_add_n_of_three)
OF_PARTS = (
    cubed_sum,
    argmax_of_rows,
    argmax_of_columns,
    argmin_with_value,
    amax_of_rows,
    logcumsumexp,
    batch_norm_by_what_is_given,
    variance,
)
OF_PARTS += (one_norm, median, segment_max, segment_sum, scatter, scatter_min, largest_rows, divergence)
OF_PARTS += (as_many_as_are_positive,)

CASES = {f"{f.__name__}, tp": (functools.partial(RowParallel, f), TP, plain) for f in OF_SUMS}
CASES |= {f"{f.__name__}, rows": (functools.partial(Rows, f), DP, plain) for f in OF_PARTS}
CASES |= {f"{f.__name__}, columns": (functools.partial(Rows, f), COLUMNS, plain) for f in OF_PARTS}
CASES |= {
    f"{kind.__name__}, rows": (lambda kind=kind: WithGradient(kind()), DP, plain)
    for kind in (ThroughSign, CentredGradient, MeanGradient)
}
CASES |= {
    f"{name} kept whole, rows": (functools.partial(Kept, name), {**DP, "rules": {name: rule}}, plain)
    for name, rule in KEPT.items()
}
CASES |= {
    "batch_norm, rows": (Normed, DP, plain),
    "clipping, momentum": (functools.partial(Rows, cubed_sum), DP, functools.partial(clipped, optimizer=MOMENTUM)),
    "clipping, Adam": (functools.partial(Rows, cubed_sum), DP, functools.partial(clipped, optimizer=ADAM)),
    "value_and_grad": (functools.partial(RowParallel, rms_norm), TP, by_value_and_grad),
    "evaluated first": (functools.partial(RowParallel, rms_norm), TP, evaluated_first),
}


def outcomes(names, check=False):
    """{name: losses, or the message}; one process is one device."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    module._engines.clear()
    told = {}
    for name in names:
        make, settings, way = CASES[name]
        try:
            net = auto_parallel(make(), **settings, check=check) if launched_processes() > 1 else make()
            step = way(net)
            told[name] = [float(step(Tensor(drawn(8, 6, seed=1))).asnumpy()) for _ in range(STEPS)]
        except ConfigError as error:
            told[name] = str(error)
    for each in module._engines.values():
        each.close()
    return told


def checked(names, fault):
    """`outcomes` with check=True, of a partitioner with a fault."""
    with planted(fault) if fault else contextlib.nullcontext():
        return outcomes(names, True)


def fed(what):
    """The message on each rank that is given something else."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    module._engines.clear()
    x = drawn(8, 6)
    if what == "its own rows":
        x = x[4 * launched_rank() :][:4]
    elif what == "shuffled otherwise":
        x = x[np.random.RandomState(launched_rank()).permutation(8)]
    elif what == "an uneven batch on one":
        x = x[: 8 - launched_rank()]
    net = auto_parallel(Rows(cubed_sum), **DP)
    try:
        plain(net)(Tensor(x))
    except ConfigError as error:
        return str(error)
    finally:
        for engine in module._engines.values():
            engine.close()
    return launched_processes()
