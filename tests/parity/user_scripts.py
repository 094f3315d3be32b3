# SPDX-License-Identifier: Apache-2.0
"""Scripts of users: ways to train, to call and to ask."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.amp import DynamicLossScaler, all_finite
from user_cases import STEPS, Case, by_step, columns, ids, momentum, normal, rows, trained, uniform

ROWS = 8
X, LABEL = normal(ROWS, 6), ids(4, ROWS)


class Mlp(nn.Cell):
    """Logits."""

    def __init__(self, inputs=6, outputs=4):
        super().__init__()
        self.up, self.down = nn.Dense(inputs, 8), nn.Dense(8, outputs)

    def construct(self, x):
        return self.down(ops.tanh(self.up(x)))


class Loss(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = Mlp()

    def construct(self, x, label):
        return ops.cross_entropy(self.net(x), label)


RULES = columns("up") | rows("down")


def case(script, rules=None, settings=None, refused=""):
    return Case(script, RULES if rules is None else rules, settings or {}, refused)


class Clipping(nn.TrainOneStepCell):
    """By hand; then weight decay."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        gradients = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        square = 0.0
        for each in gradients:
            square = square + (each * each).sum()
        scale, clipped = 0.1 / ops.maximum(ops.sqrt(square), Tensor(0.1, ms.float32)), ()
        for each in gradients:
            clipped = (*clipped, each * scale)
        return ops.depend(loss, self.optimizer(clipped))


def by(make_step):
    def style(net, batch):
        step = make_step(net, momentum(net.trainable_params())).set_train()
        return [step(*batch) for _ in range(STEPS)]

    return style


def with_optimizer(make, refused=""):
    return trained(Loss, X, LABEL, rules=RULES, optimizer=make, refused=refused)


def groups(parameters):
    """Own rates and decays of some."""
    biases = [p for p in parameters if "bias" in p.name]
    others = [p for p in parameters if "bias" not in p.name]
    return nn.Momentum([{"params": others, "weight_decay": 0.01, "lr": 0.05}, {"params": biases, "lr": 0.1}], 0.01, 0.9)


def falling_rate(parameters):
    return nn.AdamWeightDecay(parameters, nn.ExponentialDecayLR(0.01, 0.5, 2), weight_decay=0.1)


def sensitivity(net, batch):
    """`sens_param=True`: the gradient of each row's loss weighed."""

    class Weighed(nn.Cell):
        def __init__(self, network, optimizer):
            super().__init__(auto_prefix=False)
            self.network, self.optimizer, self.weights = network, optimizer, optimizer.parameters
            self.grad = ops.GradOperation(get_by_list=True, sens_param=True)

        def construct(self, x, label, weight):
            losses = self.network(x, label)
            return ops.depend(losses, self.optimizer(self.grad(self.network, self.weights)(x, label, weight)))

    step = Weighed(net, momentum(net.trainable_params())).set_train()
    return [step(*batch, uniform(ROWS, seed=8)) for _ in range(STEPS)]


class LossOfRows(Loss):
    def construct(self, x, label):
        return ops.cross_entropy(self.net(x), label, reduction="none")


class Nested(nn.Cell):
    """Dicts in and out."""

    def __init__(self):
        super().__init__()
        self.net = Mlp()

    def construct(self, batch, scale=1.0, extra=None):
        logits = self.net(batch["x"]) * scale
        loss = ops.cross_entropy(logits, batch["label"])
        if extra is not None:
            loss = loss + (logits * extra[0]).mean() + extra[1].mean()
        return {"loss": loss, "parts": (logits, [logits.argmax(1), None]), "number": 3}


def nested_script(parallel):
    inner = Nested()
    net, weights = parallel(inner), inner.trainable_params()
    optimizer = momentum(weights)
    batch, extra, told = {"x": X, "label": LABEL}, (normal(ROWS, 4), normal(3, 4)), []

    def loss_of(batch, extra):
        return net(batch, scale=0.5, extra=extra)["loss"]

    gradients = ms.value_and_grad(loss_of, None, weights)
    net.set_train()
    for _ in range(STEPS):
        loss, found = gradients(batch, extra)
        made = net(batch, extra=extra)
        assert made["number"] == 3 and made["parts"][1][1] is None
        optimizer(found)
        told.append([loss, made["loss"], made["parts"][0], made["parts"][1][0]])
    return told, [inner]


def keywords_script(parallel):
    inner = Loss()
    net = parallel(inner)
    gradients, optimizer = ms.value_and_grad(net, None, inner.trainable_params()), momentum(inner.trainable_params())
    told = []
    for _ in range(STEPS):
        loss, found = gradients(X, LABEL)
        optimizer(found)
        told.append([loss, net(label=LABEL, x=X), net(X, label=LABEL)])
    return told, [inner]


def gradients_of_inputs(parallel):
    """Adversarial training: rows moved along the sign of their gradient."""
    inner = Loss()
    net = parallel(inner)
    slope, step = ms.grad(net, 0), nn.TrainOneStepCell(net, momentum(inner.trainable_params())).set_train()
    told = []
    for _ in range(STEPS):
        moved = slope(X, LABEL)
        told += [moved, step(X + 0.1 * ops.sign(moved), LABEL)]
    return told, [inner]


def scalar_first(parallel):
    """A number before the batch."""

    class Scaled(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net = Mlp()

        def construct(self, temperature, x, label):
            return ops.cross_entropy(self.net(x) / temperature, label)

    inner = Scaled()
    return by_step(parallel(inner), (Tensor(2.0, ms.float32), X, LABEL)), [inner]


def dynamic_scale(parallel):
    """`DynamicLossScaler` in a compiled function."""
    inner = Loss()
    net, weights = parallel(inner), inner.trainable_params()
    optimizer, scaler = momentum(weights), DynamicLossScaler(1024, 2, 2)

    def scaled(x, label):
        return scaler.scale(net(x, label))

    gradients = ms.value_and_grad(scaled, None, weights)

    @ms.jit
    def step(x, label):
        loss, found = gradients(x, label)
        found = scaler.unscale(found)
        finite = all_finite(found)
        scaler.adjust(finite)
        return ops.depend(scaler.unscale(loss), optimizer(found)), finite

    return [[*step(X, LABEL), float(scaler.scale_value.asnumpy())] for _ in range(STEPS)], [inner]


def gan(parallel):
    """Two networks and two optimizers."""
    generator, critic = Mlp(4, 6), Mlp(6, 1)
    critic.update_parameters_name("critic.")
    make, judge = parallel(generator), parallel(critic)
    real, noise = normal(ROWS, 6, seed=9), normal(ROWS, 4, seed=10)

    def against(logits, answer):
        wanted = ops.ones_like(logits) * answer
        return ops.binary_cross_entropy_with_logits(logits, wanted, ops.ones_like(logits), ops.ones_like(logits))

    def of_critic(real, noise):
        return against(judge(real), 1.0) + against(judge(make(noise)), 0.0)

    def of_generator(noise):
        made = make(noise)
        return against(judge(made), 1.0), made

    critics, makers = critic.trainable_params(), generator.trainable_params()
    first, second = (
        ms.value_and_grad(of_critic, None, critics),
        ms.value_and_grad(of_generator, None, makers, has_aux=True),
    )
    of_critics, of_makers, told = nn.Adam(critics, 0.01), momentum(makers), []
    for _ in range(STEPS):
        loss, found = first(real, noise)
        of_critics(found)
        (other, made), found = second(noise)
        of_makers(found)
        told += [loss, other, made]
    return told, [generator, critic]


class Plain(Mlp):
    def construct(self, x, label):
        return ops.cross_entropy(super().construct(x), label)


def names_alike(parallel):
    """Two networks of one script whose parameters have the same names, in graphs of their own."""
    first, second = Plain(6, 4), Plain(8, 6)
    one, two = parallel(first), parallel(second)
    batch, other = (X, LABEL), (normal(ROWS, 8, seed=9), LABEL)
    steps = [nn.TrainOneStepCell(net, momentum(net.trainable_params())).set_train() for net in (one, two)]
    told = [[step(*given) for step, given in zip(steps, (batch, other), strict=True)] for _ in range(STEPS)]
    return [told, one.set_train(False)(*batch), two.set_train(False)(*other)], []


def gradient_penalty(parallel):
    """WGAN-GP: the gradient with respect to inputs, differentiated again."""

    class Penalty(nn.Cell):
        def __init__(self):
            super().__init__()
            self.critic = Mlp(6, 2)
            self.slope = ops.grad(self.score, 0)

        def score(self, x):
            return self.critic(x).sum()

        def construct(self, real, fake, share):
            mixed = share * real + (1 - share) * fake
            norm = ops.sqrt((self.slope(mixed) ** 2).sum(1) + 1e-6)
            return self.critic(fake).mean() - self.critic(real).mean() + 10 * ((norm - 1) ** 2).mean()

    inner = Penalty()
    return by_step(parallel(inner), (X, normal(ROWS, 6, seed=3), uniform(ROWS, 1))), [inner]


def moving_average(parallel):
    """Weights are averaged in a compiled step."""
    inner = Loss()
    net, weights = parallel(inner), ms.ParameterTuple(inner.trainable_params())
    optimizer, averages = momentum(weights), weights.clone("average")
    gradients, update = ms.value_and_grad(net, None, weights), ops.HyperMap()

    def mixed(average, weight):
        return ops.assign(average, 0.9 * average + 0.1 * weight)

    @ms.jit
    def step(x, label):
        loss, found = gradients(x, label)
        loss = ops.depend(loss, optimizer(found))
        return ops.depend(loss, update(mixed, averages, weights))

    told = [step(X, LABEL) for _ in range(STEPS)]

    class Kept(nn.Cell):
        def __init__(self):
            super().__init__()
            self.kept = averages

    return told, [inner, Kept()]


class Queue(nn.Cell):
    """MoCo: keys of earlier batches, a momentum encoder, both changed in `construct`."""

    def __init__(self):
        super().__init__()
        self.encoder, self.slow = nn.Dense(6, 8), nn.Dense(6, 8)
        self.queue = Parameter(normal(16, 8, seed=11), name="queue", requires_grad=False)
        self.count = Parameter(Tensor(0, ms.int32), name="count", requires_grad=False)
        for each in self.slow.get_parameters():
            each.requires_grad = False

    def construct(self, x, other):
        ops.assign(self.slow.weight, 0.9 * self.slow.weight + 0.1 * self.encoder.weight)
        query, key = self.encoder(x), ops.stop_gradient(self.slow(other))
        logits = ops.cat(((query * key).sum(1, keepdims=True), ops.matmul(query, self.queue.value().T)), 1)
        loss = ops.cross_entropy(logits * 0.1, ops.zeros((ROWS,), ms.int32))
        loss = ops.depend(loss, ops.assign(self.queue, ops.cat((key, self.queue[:8]), 0)))
        return ops.depend(loss, ops.assign_add(self.count, Tensor(1, ms.int32)))


class Tracked(nn.Cell):
    """A mean of activations that every call updates."""

    def __init__(self):
        super().__init__()
        self.net, self.mean = Mlp(), Parameter(Tensor(np.zeros(4, np.float32)), name="mean", requires_grad=False)

    def construct(self, x, label):
        logits = self.net(x)
        self.mean = 0.9 * self.mean + 0.1 * ops.stop_gradient(logits.mean(0))
        return ops.cross_entropy(logits - self.mean, label)


def loss_scale_cell(net, batch):
    step = nn.TrainOneStepWithLossScaleCell(
        net, momentum(net.trainable_params()), Tensor(128.0, ms.float32)
    ).set_train()
    return [step(*batch) for _ in range(STEPS)]


def accumulation(parallel):
    """Gradients of two halves of the batch, in a compiled function."""
    inner = Loss()
    net, weights = parallel(inner), inner.trainable_params()
    optimizer, gradients, add = momentum(weights), ms.value_and_grad(net, None, weights), ops.HyperMap()

    @ms.jit
    def step(x, label):
        loss, found = gradients(x[:4], label[:4])
        other, more = gradients(x[4:], label[4:])
        return ops.depend(loss + other, optimizer(add(ops.add, found, more)))

    return [step(X, LABEL) for _ in range(STEPS)], [inner]


def by_gradients(net, batch):
    weights = net.trainable_params()
    gradients, optimizer, told = ms.value_and_grad(net, None, weights), momentum(weights), []
    for _ in range(STEPS):
        loss, found = gradients(*batch)
        optimizer(found)
        told.append([loss, found[0]])
    return told


def two_optimizers(net, batch):
    """One for matrices, one for biases, in one step."""
    weights = net.trainable_params()
    matrices, biases = [p for p in weights if p.ndim > 1], [p for p in weights if p.ndim == 1]
    first, second = nn.RMSProp(matrices, 0.01), momentum(biases)
    first.update_parameters_name("first.")
    gradients = ms.value_and_grad(net, None, [*matrices, *biases])

    @ms.jit
    def step(*batch):
        loss, found = gradients(*batch)
        done = first(found[: len(matrices)]), second(found[len(matrices) :])
        return ops.depend(loss, done)

    return [step(*batch) for _ in range(STEPS)]


def norms_of_gradients(net, batch):
    """What a user logs: norms, the largest entry, a gradient itself."""
    weights = net.trainable_params()
    gradients, optimizer, told = ms.value_and_grad(net, None, weights), momentum(weights), []
    for _ in range(STEPS):
        loss, found = gradients(*batch)
        told.append([loss, *(np.linalg.norm(g.asnumpy()) for g in found), found[0], found[0].abs().max()])
        optimizer(ops.clip_by_norm(found, 0.5))
    return told


OPTIMIZERS = {
    "rms prop": lambda p: nn.RMSProp(p, 0.01, centered=True, momentum=0.5),
    "groups of parameters": groups,
    "falling rate": falling_rate,
}

CHECKED = {"check": True}
CASES = {
    "checked step": trained(Loss, X, LABEL, rules=RULES, settings=CHECKED),
    "checked gradients": trained(Loss, X, LABEL, rules=RULES, settings=CHECKED, style=by_gradients),
    "checked gan": case(gan, settings=CHECKED),
    "checked function": case(accumulation, settings=CHECKED),
    "clipping by hand": trained(Loss, X, LABEL, rules=RULES, style=by(Clipping)),
    "sensitivity": trained(LossOfRows, X, LABEL, rules=RULES, style=sensitivity),
    "nested": case(nested_script),
    "keywords": case(keywords_script),
    "gradients of inputs": case(gradients_of_inputs),
    "number first": case(scalar_first),
    "dynamic scale": case(dynamic_scale),
    "gan": case(gan),
    "names alike": case(names_alike),
    "gradient penalty": case(gradient_penalty),
    "moving average": case(moving_average),
    "queue": trained(Queue, X, normal(ROWS, 6, seed=3), rules=columns("encoder")),
    "tracked mean": trained(Tracked, X, LABEL, rules=RULES),
    "loss scale cell": trained(
        *(Loss, X, LABEL),
        rules=RULES,
        style=loss_scale_cell,
        refused="TrainOneStepWithLossScaleCell has an `if` or `while` on a Tensor",
    ),
    "lamb": with_optimizer(lambda p: nn.Lamb(p, 0.01, weight_decay=0.1), "MindSpore has no kernel of "),
    "asgd": with_optimizer(
        lambda p: nn.ASGD(p, learning_rate=0.05),
        "ASGD has an `if` or `while` on a Tensor, and one of its ways writes something (Assign)",
    ),
    "two optimizers": trained(Loss, X, LABEL, rules=RULES, style=two_optimizers),
    "norms of gradients": trained(Loss, X, LABEL, rules=RULES, style=norms_of_gradients),
    **{name: with_optimizer(make) for name, make in OPTIMIZERS.items()},
}
