# SPDX-License-Identifier: Apache-2.0
"""Networks and ways of training as users of MindSpore write them, run on one device or under a mesh."""

import functools
from pathlib import Path

import mindspore as ms
import numpy as np
from layered_networks import Borrowed, Functional, Gated, GatedBlock, TiedOutside
from mindspore import Tensor, nn, ops
from mindspore.train import Model

from sporeloom import auto_parallel, own_rows, save_checkpoint
from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.compile import rank_report
from sporeloom.dry_run.partitioned import partition_custom
from sporeloom.runtime import auto_parallel as module
from sporeloom.runtime.environment import launched_processes, launched_rank
from sporeloom.strategy.loader import strategy_of
from sporeloom.strategy.tensor_slice import TensorSlice

STEPS = 4


class Mlp(nn.Cell):
    """Rows -> loss; the mean is taken inside MindSpore's operator."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Dense(12, 32), nn.ReLU(), nn.Dense(32, 5)
        self.loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def construct(self, x, label):
        return self.loss(self.down(self.act(self.up(x))), label)


class Plain(nn.Cell):
    """Logits; the loss is the script's."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Dense(12, 32), nn.Tanh(), nn.Dense(32, 5)

    def construct(self, x):
        return self.down(self.act(self.up(x)))


class Mixture(nn.Cell):
    """Experts as one product, weighed; sharded over tp, the outer dim, and rows over dp."""

    def __init__(self):
        super().__init__()
        drawn = np.random.RandomState(0)
        self.router, self.soft, self.tile = nn.Dense(12, 4), ops.Softmax(-1), ops.Tile()
        self.first = ms.Parameter(Tensor(drawn.randn(4, 12, 16).astype(np.float32) * 0.2))
        self.second = ms.Parameter(Tensor(drawn.randn(4, 16, 5).astype(np.float32) * 0.2))
        self.up, self.down, self.loss = ops.BatchMatMul(), ops.BatchMatMul(), nn.CrossEntropyLoss()

    def construct(self, x, label):
        weights = self.soft(self.router(x)).T.expand_dims(-1)
        each = self.down(ops.gelu(self.up(self.tile(x.expand_dims(0), (4, 1, 1)), self.first)), self.second)
        return self.loss((each * weights).sum(0), label)


class Cnn(nn.Cell):
    """Its loss is MindSpore's operator, which averages the rows it is given."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.groups = nn.GroupNorm(2, 8)
        self.flatten, self.head = nn.Flatten(), nn.Dense(8 * 6 * 6, 5)
        self.loss = ops.SparseSoftmaxCrossEntropyWithLogits()

    def construct(self, x, label):
        return self.loss(self.head(self.flatten(self.groups(self.relu(self.norm(self.conv(x)))))), label)


class Bag(nn.Cell):
    """Words -> score; the table is used twice, a parameter never."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.seen = ms.Parameter(Tensor(np.zeros(4, np.float32)), name="seen", requires_grad=False)  # read and written
        self.mean, self.square = ops.ReduceMean(), ops.Square()
        self.unused = nn.Dense(4, 4)

    def construct(self, words, target):
        x = self.table(words).mean(1)
        logits = ops.matmul(x, self.table.embedding_table.T)
        seen = ops.assign_add(self.seen, x[0, :4])
        return self.mean(self.square(logits - target)) + seen.sum()


class Lstm(nn.Cell):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Dense(8, 3)

    def construct(self, x, target):
        out, (hidden, _) = self.lstm(x)
        return ((self.head(out) - target) ** 2).mean() + (hidden * hidden).mean()


class Encoder(nn.Cell):
    """Layers whose weights are used by functions of MindSpore."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Dense(16, 3)

    def construct(self, x, target):
        return ((self.head(self.encoder(x)) - target) ** 2).mean()


class While(Mlp):
    def construct(self, x, label):
        x = self.up(x)
        while x.max() > 1:
            x = x * 0.5
        return ops.cross_entropy(self.down(x), label)


def data(name, rows=16):
    rng = np.random.RandomState(1)
    normal = lambda *shape: rng.randn(*shape).astype(np.float32)  # noqa: E731
    labels = rng.randint(0, 5, rows).astype(np.int32)
    labels[: rows // 4] = 0  # unequal in the parts of the batch
    return {
        "mlp": (normal(rows, 12), labels),
        "gated": (normal(rows, 12), labels),
        "functional": (normal(rows, 12), labels),
        "tied": (normal(rows, 12), labels),
        "borrowed": (normal(rows, 12), labels),
        "mixture": (normal(rows, 12), labels),
        "plain": (normal(rows, 12), labels),
        "cnn": (normal(rows, 3, 6, 6), labels),
        "bag": (rng.randint(0, 40, (rows, 7)).astype(np.int32), normal(rows, 40)),
        "lstm": (normal(rows, 5, 6), normal(rows, 5, 3)),
        "encoder": (normal(rows, 5, 16), normal(rows, 5, 3)),
    }[name]


NETWORKS = {
    "mlp": Mlp,
    "plain": Plain,
    "gated": Gated,
    "functional": Functional,
    "tied": TiedOutside,
    "borrowed": Borrowed,
    "mixture": Mixture,
    "cnn": Cnn,
    "bag": Bag,
    "lstm": Lstm,
    "encoder": Encoder,
}


def by_step(net, batch):
    step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1)).set_train()
    return [float(step(*batch).asnumpy()) for _ in range(STEPS)]


def by_gradients(net, batch, clip_norm=None):
    weights, optimizer = net.trainable_params(), nn.SGD(net.trainable_params(), 0.1)
    net.set_train()
    gradients, losses = ms.value_and_grad(net, None, weights), []
    for _ in range(STEPS):
        loss, found = gradients(*batch)
        optimizer(ops.clip_by_global_norm(found, clip_norm) if clip_norm else found)
        losses.append(float(loss.asnumpy()))
    return losses


class Accumulating(nn.TrainOneStepCell):
    """Adds each step's gradients to those before."""

    def __init__(self, net, optimizer):
        super().__init__(net, optimizer)
        self.sums, self.each = self.weights.clone("sums", "zeros"), ops.HyperMap()

    def construct(self, *inputs):
        loss = self.network(*inputs)
        gradients = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss)))
        gradients = self.each(ops.add, self.sums, gradients)
        loss = ops.depend(loss, self.each(ops.assign, self.sums, gradients))
        return ops.depend(loss, self.optimizer(gradients))


def by_accumulation(net, batch):
    step = Accumulating(net, nn.SGD(net.trainable_params(), 0.05)).set_train()
    return [float(step(*batch).asnumpy()) for _ in range(STEPS)]


def by_step_then_judged(net, batch):
    """The last is the loss of the network that no longer trains, in a function."""
    losses = by_step(net, batch)
    net.set_train(False)

    @ms.jit
    def judge(x, label):
        return net(x, label)

    return [*losses, float(judge(*batch).asnumpy())]


def by_step_then_called(net, batch):
    """The last is the loss of the network that no longer trains."""
    losses = by_step(net, batch)
    return [*losses, float(net.set_train(False)(*batch).asnumpy())]


def by_model(net, batch):
    class Recorded(ms.train.Callback):
        def __init__(self):
            super().__init__()
            self.losses = []

        def step_end(self, run_context):
            self.losses.append(float(run_context.original_args().net_outputs.asnumpy()))

    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    recorded = Recorded()
    model = Model(net, loss, nn.SGD(net.trainable_params(), 0.1), metrics={"accuracy", "loss"})
    dataset = ms.dataset.NumpySlicesDataset(batch, ["x", "label"], shuffle=False).batch(len(batch[0]))
    model.train(STEPS, dataset, callbacks=[recorded], dataset_sink_mode=False)
    found = model.eval(dataset, dataset_sink_mode=False)
    predicted = model.predict(Tensor(batch[0])).asnumpy()
    if launched_processes() > 1:
        mesh = module.parallel_of(net, "").report.mesh
        parts, place = predicted.reshape(mesh.dp, -1, *predicted.shape[1:]), mesh.coordinate(launched_rank(), "dp")
        np.testing.assert_array_equal(own_rows(net, Tensor(predicted)).asnumpy(), parts[place])
    return [*recorded.losses, found["loss"], found["accuracy"], *predicted[:, 0].tolist()]


WAYS = {
    "step": by_step,
    "step, judged": by_step_then_judged,
    "step, called": by_step_then_called,
    "clipped gradients": functools.partial(by_gradients, clip_norm=0.5),
    "accumulation": by_accumulation,
    "model": by_model,
}


def train(name, way, mesh, settings=None):
    """(losses, this rank's part of each parameter and where it lies) of a network trained in a way; without a mesh on one
    device."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    module._engines.clear()
    net = inner = NETWORKS[name]()
    batch = data(name)
    if mesh == "auto":
        net = auto_parallel(net, "auto", **settings)
    elif mesh:
        net = auto_parallel(net, mesh=mesh, **(settings or {}))
    losses = WAYS[way](net, batch if way == "model" else tuple(map(Tensor, batch)))
    parts = {}
    for parameter in inner.get_parameters():
        part = TensorSlice.full(parameter.shape)
        engine = next(iter(module._engines.values()), None) if mesh else None
        if engine and not engine.holds_now(parameter, inner.parallel_report.of(parameter.name).global_shape):
            continue  # another stage does
        layout = engine.backend.layouts.get(parameter.name) if engine else None
        if layout is not None:
            report = inner.parallel_report.of(parameter.name)
            part = layout.stored_slice(report.global_shape, engine.rank, engine.backend.groups)
        parts[parameter.name] = ([[s.start, s.stop] for s in part.slices], parameter.asnumpy().tolist())
    for engine in module._engines.values():
        engine.close()
    return losses, parts


def saved(name, folder, mesh=None, settings=None):
    """Trains and saves under a mesh; without one loads what was saved: {file: the loss of what it holds}."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    module._engines.clear()
    net, batch = NETWORKS[name](), tuple(map(Tensor, data(name)))
    files, losses = [f"{folder}/{name}.{kind}" for kind in ("ckpt", "safetensors")], {}
    if mesh:
        for file in files:
            left = Path(file).with_name(f".{Path(file).name}.parts")  # by a run that was killed
            left.mkdir(exist_ok=True)
            (left / "rank_1.safetensors").write_bytes(b"not whole")
        net = auto_parallel(net, mesh=mesh, **settings)
        (by_gradients if name == "borrowed" else by_step)(net, batch)
    for file in files:
        if mesh:
            save_checkpoint(net, file)
        else:
            left, _ = ms.load_param_into_net(net, ms.load_checkpoint(file, format=file.rpartition(".")[2]))
            assert left == []
        losses[file] = float(net.set_train(False)(*batch).asnumpy())
    for engine in module._engines.values():
        engine.close()
    return losses


def refused(what):
    """The message that a script gets."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    module._engines.clear()
    batch = data("mlp")
    try:
        engine = {"engine": "mindspore"} if what == "mindspore" else {}
        net = auto_parallel((While if what == "while" else Mlp)(), mesh={"dp": 2}, **engine)
        if what == "while":
            by_step(net, tuple(map(Tensor, batch)))
        elif what == "no such operator":
            net = auto_parallel(Functional(), mesh={"tp": 2}, rules={"MatMulExt_2": [[None, None], [None, "tp"]]})
            by_step(net, tuple(map(Tensor, data("functional"))))
        elif what == "uneven microbatches":
            net = auto_parallel(Gated(), mesh={"pp": 2}, pipeline={"num_microbatches": 4})
            by_step(net, tuple(Tensor(array[:10]) for array in data("gated")))
        elif what == "uneven":
            net(Tensor(batch[0][:3]), Tensor(batch[1][:3]))
        elif what == "no tensor":
            net(Tensor(batch[0]), object())
        elif what == "eager":
            ms.set_context(mode=ms.PYNATIVE_MODE)
            net(*map(Tensor, batch))
    except ConfigError as error:
        return str(error)
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
        for engine in module._engines.values():
            engine.close()
    return "nothing"


class Stacked(nn.Cell):
    """Logits, the last product in bfloat16."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([GatedBlock(), GatedBlock()])
        self.head = nn.Dense(12, 5).to_float(ms.bfloat16)

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def predicted(settings):
    """Of a network whose first stage computes nothing in bfloat16; without settings on one device."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    module._engines.clear()
    net, x = Stacked(), Tensor(data("gated")[0])
    if settings:
        output = auto_parallel(net, **settings)(x).astype(ms.float32).asnumpy()
    else:
        for block in net.blocks:
            x = block(x)
        output = x.asnumpy() @ net.head.weight.asnumpy().T + net.head.bias.asnumpy()
    for engine in module._engines.values():
        engine.close()
    return output.tolist()


def flops_of_functional(rules):
    """Of a rank of two, forward and backward."""
    shapes = [((16, 12), np.float32), ((16,), np.int32)]
    strategy = strategy_of({"mesh": {"tp": 2}, "rules": {"operators": rules}})
    return sum(rank_report(partition_custom(Functional, strategy, shapes), 0).flops.values())


def cnn_in_stages():
    """Bytes of gradients and of parameters, and FLOPs by phase, of both stages: its norm mixes the rows of the batch."""
    shapes = [((16, 3, 6, 6), np.float32), ((16,), np.int32)]
    strategy = strategy_of({"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 4}})
    partitioned = partition_custom(Cnn, strategy, shapes)
    reports = [rank_report(partitioned, rank) for rank in (0, 1)]
    return [
        (r.gradient_bytes, {p.name: p.num_bytes for p in r.parameters}, r.flops, r.num_microbatches) for r in reports
    ]


def flops_of_cnn():
    """Of a rank of two."""
    shapes = [((16, 3, 6, 6), np.float32), ((16,), np.int32)]
    partitioned = partition_custom(Cnn, strategy_of({"mesh": {"dp": 2}}), shapes)
    return sum(rank_report(partitioned, 0).flops.values())


def two():
    """Losses of two networks under two meshes, a step of each in turn; and of each alone on one device."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    module._engines.clear()
    meshes = [{"mesh": {"dp": 4}}, {"mesh": {"dp": 2, "tp": 2}, "rules": {"up.matmul": [["dp", None], ["tp", None]]}}]
    batch, steps, alone = tuple(map(Tensor, data("mlp"))), [], []
    for number, settings in enumerate(meshes):
        for parallel in (False, True):
            ms.set_seed(number)
            net = auto_parallel(Mlp(), **settings) if parallel else Mlp()
            step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1)).set_train()
            if parallel:
                steps.append(step)
            else:
                alone.append([float(step(*batch).asnumpy()) for _ in range(3)])
    told = [[float(step(*batch).asnumpy()) for step in steps] for _ in range(3)]
    for engine in module._engines.values():
        engine.close()
    return [losses[0] for losses in told], [losses[1] for losses in told], alone
