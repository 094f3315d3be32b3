# SPDX-License-Identifier: Apache-2.0
"""Two small networks that meet most rules of the partitioner, and the first step of their training: losses before and after
it, the norm, all gradients and weights."""

import mindspore as ms
import numpy as np
from all_ranks import drawn
from mindspore import Tensor, nn, ops

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY, CLASSES = 8, 4, 8, 4, 24, 6
GRID = {"dp": 2, "tp": 2}
BY_ROW = ("dp",)


def weight(name, *shape, seed, scale=0.4):
    return ms.Parameter(Tensor(drawn(*shape, seed=seed) * scale), name=name)


class Decoder(nn.Cell):
    """A layer of a decoder with a tied table, whose losses are added up by hand, and terms over the whole batch."""

    inputs = (np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32),)
    layouts = {
        "table": (("tp",), ()),
        "qkv": (("tp",), ()),
        "out": ((), ("tp",)),
        "up": (("tp",), ()),
        "up_bias": (("tp",),),
        "down": ((), ("tp",)),
        "mixed": (("tp", "dp"), ()),
        "shared_out": (("dp",), ()),
        "turned": ((), ("dp",)),
    }

    def __init__(self):
        super().__init__()
        self.table, self.places = weight("table", VOCABULARY, WIDTH, seed=2), weight("places", LENGTH, WIDTH, seed=3)
        self.gain, self.qkv = weight("gain", WIDTH, seed=4, scale=1.0), weight("qkv", 3 * WIDTH, WIDTH, seed=5)
        self.out, self.out_bias = weight("out", WIDTH, WIDTH, seed=6), weight("out_bias", WIDTH, seed=7)
        self.up, self.up_bias = weight("up", 2 * WIDTH, WIDTH, seed=8), weight("up_bias", 2 * WIDTH, seed=9)
        self.down, self.mixed = weight("down", WIDTH, 2 * WIDTH, seed=10), weight("mixed", WIDTH, WIDTH, seed=11)
        self.shared_out, self.norm = weight("shared_out", WIDTH, WIDTH, seed=12), nn.LayerNorm((WIDTH,))
        self.turned = weight("turned", ROWS, WIDTH, seed=16)
        self.dropout = nn.Dropout(p=1e-7)  # of which none is dropped, but all is as if it were
        self.one, self.zero = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        self.spots = Tensor(drawn(LENGTH * HEADS, 2, seed=17))
        self.labels = Tensor(np.random.default_rng(13).integers(0, VOCABULARY, (ROWS * LENGTH,)).astype(np.int32))
        self.segments = Tensor(np.random.default_rng(14).integers(0, 5, (ROWS,)).astype(np.int32))
        self.targets = Tensor(np.random.default_rng(15).random((ROWS, WIDTH)).astype(np.float32))

    def attention(self, x):
        q, k, v = ops.split(ops.matmul(x, self.qkv.T).reshape(ROWS, LENGTH, HEADS, 6), 2, axis=3)
        merged = v.reshape(ROWS, LENGTH * HEADS, 2) * self.spots
        q, k, v = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        mixed = ops.matmul(ops.softmax(ops.matmul(q, k) * 0.7, -1), v)
        return (
            ops.matmul(mixed.transpose(0, 2, 1, 3).reshape(ROWS, LENGTH, WIDTH), self.out.T)
            + self.out_bias
            + (merged * merged).mean()
        )

    def construct(self, tokens):
        x = ops.gather(self.table, tokens, 0) + self.places
        normed = x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + 1e-5) * self.gain
        attended = self.attention(normed)
        h = self.norm(x + attended)
        up = ops.matmul(h, self.up.T) + self.up_bias
        d = ops.matmul(0.5 * up * (1.0 + ops.tanh(0.8 * (up + 0.04 * up * up * up))), self.down.T)
        x = ops.addn([x, d, attended * self.gain])
        logits = ops.matmul(x.reshape(ROWS * LENGTH, WIDTH), self.table.T)
        shifted = logits - ops.amax(logits, 1, True)
        chosen = (shifted * ops.one_hot(self.labels, VOCABULARY, self.one, self.zero)).sum(1)
        loss = (ops.log(ops.exp(shifted).sum(1)) - chosen).mean()
        bent = ops.tanh(ops.matmul(up, self.down.T)) + ops.exp(ops.matmul(up * up, self.down.T) * 0.1)
        return loss + self.over_the_batch(d, x.mean(1)) + bent.mean()

    def over_the_batch(self, d, rows):
        rows = ops.matmul(ops.matmul(rows, self.mixed.T), self.shared_out)
        gram = ops.matmul(rows.T, rows) * 0.1
        pooled = ops.cat((rows[1:5], ops.cumsum(rows, 0)), 0)
        turned = rows.reshape(4, 2, WIDTH).transpose(1, 0, 2).reshape(ROWS, WIDTH)
        parts = ops.unsorted_segment_sum(rows, self.segments, ROWS) * rows
        told = ops.binary_cross_entropy(ops.sigmoid(rows), self.targets)
        return (
            (gram * gram * gram).mean()
            + (pooled * pooled).mean()
            + (turned * rows * rows).mean()
            + (parts * parts).mean()
            + (rows * self.dropout(rows) * self.turned).mean()
            + told
            + (ops.softmax(rows, 0) * rows * 4.0).sum()
            + rows.sum() / (d.sum() * d.sum() + 1.0)
            + (ops.amax(rows, 0) * rows).mean()
            + ((d * d).sum(1) * d.sum(1)).mean()
        )


class Images(nn.Cell):
    """Convolutions, the norm of a batch, pools, and a head whose classes are sharded."""

    inputs = (drawn(ROWS, 2, 4, 4, seed=21),)
    layouts = {"first": (("tp",), (), (), ()), "second": ((), ("tp",), (), ()), "head": (("tp",), ())}

    def __init__(self):
        super().__init__()
        self.first, self.second = weight("first", 4, 2, 3, 3, seed=22), weight("second", 4, 4, 3, 3, seed=23)
        self.head, self.norm = weight("head", CLASSES, 16, seed=24), nn.BatchNorm2d(4, gamma_init="uniform")
        self.labels = Tensor(np.random.default_rng(25).integers(0, CLASSES, (ROWS,)).astype(np.int32))

    def construct(self, x):
        x = ops.conv2d(x, self.first, pad_mode="same")
        x = self.norm(ops.relu(ops.conv2d(x, self.second, pad_mode="same")))
        x = ops.max_pool2d(x, 2, 2) + ops.avg_pool2d(x, 2, 2)
        return ops.cross_entropy(ops.matmul(x.reshape(ROWS, 16), self.head.T), self.labels)


NETWORKS = {"decoder": Decoder, "images": Images}


class FirstStep(nn.Cell):
    """Loss, gradients, their norm, an update by what is clipped to it, the loss after it."""

    def __init__(self, name):
        super().__init__()
        ms.set_seed(3)
        np.random.seed(3)
        self.net = NETWORKS[name]()
        weights = self.net.trainable_params()
        self.optimizer = nn.Momentum(weights, 0.1, 0.9, weight_decay=0.01)
        self.gradients, self.square = ms.value_and_grad(self.net, None, weights), ops.Square()

    def construct(self, *inputs):
        loss, gradients = self.gradients(*inputs)
        total = 0.0
        for each in gradients:
            total = total + self.square(each).sum()
        norm = ops.sqrt(total)
        clipped = ()
        for each in gradients:
            clipped = (*clipped, each * (1.0 / ops.maximum(norm, 1.0)))
        loss = ops.depend(loss, self.optimizer(clipped))
        after = self.net(*[ops.depend(each, loss) for each in inputs])
        return loss, after, norm, *gradients
