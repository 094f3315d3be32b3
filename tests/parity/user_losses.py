# SPDX-License-Identifier: Apache-2.0
"""Networks of users: losses and single layers that are not sums over rows of what each row gives."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from user_cases import channels, columns, ids, normal, rows, trained

ROWS = 8


class Features(nn.Cell):
    """Two layers, of which the second is wide, and a function of what it gives and of the labels."""

    def __init__(self, loss, outputs=8, inputs=6):
        super().__init__()
        self.first, self.dense, self.loss = nn.Dense(inputs, inputs), nn.Dense(inputs, outputs), loss

    def construct(self, x, *labels):
        return self.loss(self.dense(self.first(x)), *labels)


class TwoLayers(nn.Cell):
    """Of which the second adds up over tp, a function between them and the head."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.head = nn.Dense(6, 8), nn.Dense(8, 4), nn.Dense(4, 3)
        self.scale, self.between = Parameter(Tensor(np.ones(4, np.float32)), name="scale"), between

    def construct(self, x, label):
        return ops.cross_entropy(self.head(self.between(self.down(self.up(x)), self.scale)), label)


def gram(h):
    return (ops.matmul(h.T, h) ** 2).sum() * 0.001


def sums_of_batch(h):
    return (h.sum(0) ** 2).sum() * 0.01 + (h.mean(0) ** 3).sum()


def covariance(h):
    """VICReg: variance and covariance of the features of a batch."""
    centred = h - h.mean(0)
    spread = ops.sqrt((centred**2).mean(0) + 1e-4)
    products = ops.matmul(centred.T, centred) / (h.shape[0] - 1)
    off_diagonal = products * (1 - ops.eye(h.shape[1], h.shape[1], ms.float32))
    return ops.relu(1 - spread).mean() + (off_diagonal**2).sum() / h.shape[1]


def largest_of_columns(h, label):
    """Each row is pulled to the class that it is taken for."""
    return ops.cross_entropy(h, h.argmax(1)) + ops.cross_entropy(h, label)


def scattered(h, label):
    return (ops.tensor_scatter_add(ops.zeros((5, 8), ms.float32), label.reshape(-1, 1), h) ** 2).mean()


def pooled_by_segment(h, label):
    largest, smallest = ops.unsorted_segment_max(h, label, 5), ops.unsorted_segment_min(h, label, 5)
    seen = (ops.unsorted_segment_sum(ops.ones_like(h), label, 5) > 0).astype(ms.float32)
    return (ops.where(seen > 0, largest, 0.0) ** 2).mean() + (ops.where(seen > 0, smallest, 0.0) ** 2).mean()


def chosen_rows(h, label):
    """The hardest half of the rows."""
    each = ops.cross_entropy(h, label, reduction="none")
    hardest, where = ops.topk(each, 4)
    return hardest.mean() + (ops.gather(h, where, 0) ** 2).mean()


def written_rms_norm(d, scale):
    return d * ops.rsqrt((d * d).mean(-1, keep_dims=True) + 1e-5) * scale


def softmax_pooling(d, scale):
    """Attention over the batch."""
    return d * scale + ops.softmax(ops.matmul(d, d.T), -1) @ d


class FunctionalBatchNorm(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense, self.head = nn.Dense(6, 8), nn.Dense(8, 3)
        self.mean, self.variance = (
            Parameter(Tensor(v, ms.float32), name=n, requires_grad=False)
            for n, v in (("mean", [0] * 8), ("variance", [1] * 8))
        )
        self.gamma, self.beta = (
            Parameter(Tensor([1] * 8, ms.float32), name="gamma"),
            Parameter(Tensor([0] * 8, ms.float32), name="beta"),
        )

    def construct(self, x, label):
        h = ops.batch_norm(self.dense(x), self.mean, self.variance, self.gamma, self.beta, training=True)
        return ops.cross_entropy(self.head(ops.relu(h)), label)


class Normed(nn.Cell):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), norm, nn.Dense(4, 3)

    def construct(self, x, label):
        return ops.cross_entropy(self.head(ops.relu(self.norm(self.conv(x))).mean((2, 3))), label)


class MeanGradient(nn.Cell):
    """Identity, through which every row gets the mean gradient of the batch."""

    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, dout):
        return (ops.zeros_like(dout) + dout.mean(0),)


class OwnGradient(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense, self.even, self.head = nn.Dense(6, 8), MeanGradient(), nn.Dense(8, 3)

    def construct(self, x, label):
        return ops.cross_entropy(self.head(self.even(ops.tanh(self.dense(x)))), label)


class Siamese(nn.Cell):
    def __init__(self, loss):
        super().__init__()
        self.dense, self.loss = nn.Dense(6, 8), loss

    def construct(self, *inputs):
        encoded = ()
        for x in inputs[: 2 if len(inputs) < 4 else 3]:
            encoded = (*encoded, ops.tanh(self.dense(x)))
        return self.loss(*encoded, *inputs[len(encoded) :])


def barlow(a, b):
    a, b = (a - a.mean(0)) / (a.std(0) + 1e-5), (b - b.mean(0)) / (b.std(0) + 1e-5)
    c = ops.matmul(a.T, b) / a.shape[0]
    eye = ops.eye(8, 8, ms.float32)
    return (((c - eye) ** 2) * (eye + 0.1 * (1 - eye))).sum()


def contrastive(a, b):
    """SimCLR."""
    z = ops.cat((a, b), 0)
    z = z / ops.sqrt((z * z).sum(1, keepdims=True))
    n = z.shape[0]
    logits = ops.matmul(z, z.T) / 0.5 - ops.eye(n, n, ms.float32) * 1e9
    partner = ops.cat((ops.arange(n // 2, n), ops.arange(0, n // 2))).astype(ms.int32)
    return ops.cross_entropy(logits, partner)


def ignoring(h, label):
    return ops.cross_entropy(h, label, ignore_index=2)


def positives(h):
    """As many as there happen to be."""
    return (h[h > 0] ** 2).sum()


def different_labels(h, label):
    return h[ops.unique(label)[0]].mean() + (h**2).mean()


def either(h):
    if h.mean() > 0:
        h = h * 2 + 1
    return (h**2).mean() if h[0, 0] > 0 else h.mean()


def until(h):
    while h.abs().max() > 0.5:
        h = h * 0.5
    return h.sum()


def to_numpy(h):
    return (h * float(np.mean(h.asnumpy()))).sum()


X, LABEL = normal(ROWS, 6), ids(5, ROWS)
THREE = ids(3, ROWS)
DENSE = columns("dense")
PAIR = (X, normal(ROWS, 6, seed=5))


def layer(loss, *labels, **more):
    return trained(lambda: Features(loss), X, *labels, rules=DENSE, **more)


CASES = {
    "gram matrix": layer(gram),
    "sums over the batch": layer(sums_of_batch),
    "covariance": layer(covariance),
    "argmax of columns": layer(largest_of_columns, LABEL),
    "scatter add": layer(scattered, LABEL),
    "segment max": layer(pooled_by_segment, LABEL),
    "hard example mining": layer(chosen_rows, LABEL),
    "positives alone": layer(positives),
    "different labels": layer(different_labels, LABEL),
    "either": layer(either),
    "until": layer(
        until,
        refused="Features has an `if` or `while` on a Tensor, and it loops as long as a value says; compute every way",
    ),
    "numpy": layer(
        to_numpy,
        refused=", return (h * float(np.mean(h.asnumpy()))).sum(); a graph computes with operators of MindSpore alone",
    ),
    "ignored labels": layer(ignoring, LABEL),
    "written rms norm": trained(lambda: TwoLayers(written_rms_norm), X, THREE, rules=columns("up") | rows("down")),
    "attention over the batch": trained(
        lambda: TwoLayers(softmax_pooling), X, THREE, rules=columns("up") | rows("down")
    ),
    "functional batch norm": trained(FunctionalBatchNorm, X, THREE, rules=DENSE),
    "synchronized batch norm": trained(
        lambda: Normed(nn.SyncBatchNorm(4)), normal(ROWS, 3, 4, 4), THREE, rules=channels("conv")
    ),
    "own gradient": trained(OwnGradient, X, THREE, rules=DENSE),
    "barlow twins": trained(lambda: Siamese(barlow), *PAIR, rules=DENSE),
    "simclr": trained(lambda: Siamese(contrastive), *PAIR, rules=DENSE),
}
