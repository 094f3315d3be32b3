# SPDX-License-Identifier: Apache-2.0
"""Networks of users: small ones of the usual architectures, each with its loss."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from user_cases import channels, columns, ids, normal, rows, trained

ROWS = 8


def parameter(*shape, name, scale=0.3):
    drawn = np.random.RandomState(len(name)).randn(*shape).astype(np.float32)
    return Parameter(Tensor(drawn * np.float32(scale)), name=name)


class Clip(nn.Cell):
    """Two towers, each row against all of the other."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Dense(6, 8), nn.Dense(5, 8)
        self.scale = Parameter(Tensor(1.0, ms.float32), name="scale")

    def construct(self, image, text):
        a, b = self.image(image), self.text(text)
        a, b = a / ops.norm(a, dim=1, keepdim=True), b / ops.norm(b, dim=1, keepdim=True)
        logits, own = ops.exp(self.scale) * ops.matmul(a, b.T), ops.arange(0, ROWS).astype(ms.int32)
        return (ops.cross_entropy(logits, own) + ops.cross_entropy(logits.T, own)) / 2


class GraphAttention(nn.Cell):
    """Edges as lists: gathered by one end, normalized and added up at the other."""

    def __init__(self):
        super().__init__()
        self.dense, self.head = nn.Dense(6, 8), nn.Dense(8, 3)
        self.source, self.target = nn.Dense(8, 1), nn.Dense(8, 1)
        self.leaky = nn.LeakyReLU(0.2)

    def construct(self, x, sources, targets, label):
        h = self.dense(x)
        score = self.leaky(ops.gather(self.source(h), sources, 0) + ops.gather(self.target(h), targets, 0))[:, 0]
        weight = ops.exp(score - ops.stop_gradient(score.max()))
        total = ops.unsorted_segment_sum(weight, targets, ROWS) + 1e-6
        weight = weight / ops.gather(total, targets, 0)
        h = ops.unsorted_segment_sum(weight.expand_dims(1) * ops.gather(h, sources, 0), targets, ROWS)
        return ops.cross_entropy(self.head(ops.elu(h)), label)


class Attention(nn.Cell):
    """Heads as users write them; a bias of relative positions, as T5 has it."""

    def __init__(self, size=8, heads=2, length=0):
        super().__init__()
        self.heads, self.query, self.key, self.value = (
            heads,
            nn.Dense(size, size),
            nn.Dense(size, size),
            nn.Dense(size, size),
        )
        self.out = nn.Dense(size, size)
        self.bias = nn.Embedding(2 * length, heads) if length else None
        self.places = (
            Tensor((np.arange(length)[:, None] - np.arange(length)[None] + length).astype(np.int32)) if length else None
        )

    def split(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(0, 2, 1, 3)

    def construct(self, x, memory, mask=None):
        query, key, value = self.split(self.query(x)), self.split(self.key(memory)), self.split(self.value(memory))
        scores = ops.matmul(query, key.transpose(0, 1, 3, 2)) * 0.5
        if self.bias is not None:
            scores = scores + self.bias(self.places).transpose(2, 0, 1)
        if mask is not None:
            scores = scores + (1.0 - mask) * -1e9
        mixed = ops.matmul(ops.softmax(scores, -1), value).transpose(0, 2, 1, 3)
        return self.out(mixed.reshape(x.shape))


class Block(nn.Cell):
    def __init__(self, length=0, crosses=False):
        super().__init__()
        self.attention, self.norm, self.norm_mlp = Attention(length=length), nn.LayerNorm((8,)), nn.LayerNorm((8,))
        self.cross, self.norm_cross = (Attention(), nn.LayerNorm((8,))) if crosses else (None, None)
        self.up, self.down = nn.Dense(8, 16), nn.Dense(16, 8)

    def construct(self, x, memory=None, mask=None):
        x = x + self.attention(self.norm(x), self.norm(x), mask)
        if self.cross is not None:
            x = x + self.cross(self.norm_cross(x), memory)
        return x + self.down(ops.gelu(self.up(self.norm_mlp(x))))


class Bert(nn.Cell):
    """Words at masked places, of a tied table; whether one sentence follows the other."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), parameter(6, 8, name="places")
        self.block, self.pooler, self.next = Block(), nn.Dense(8, 8, activation="tanh"), nn.Dense(8, 2)

    def construct(self, words, mask, masked, answers, follows):
        x = self.block(self.words(words) + self.places, None, mask.reshape(ROWS, 1, 1, 6))
        found = ops.gather_elements(x, 1, ops.tile(masked.expand_dims(-1), (1, 1, 8)))
        logits = ops.matmul(found, self.words.embedding_table.T).reshape(-1, 20)
        loss = ops.cross_entropy(logits, answers.reshape(-1))
        return loss + ops.cross_entropy(self.next(self.pooler(x[:, 0])), follows)


class T5(nn.Cell):
    def __init__(self):
        super().__init__()
        self.words, self.encoder, self.decoder = nn.Embedding(20, 8), Block(length=6), Block(length=5, crosses=True)
        self.causal = Tensor(np.tril(np.ones((5, 5), np.float32)))

    def construct(self, source, target, wanted):
        memory = self.encoder(self.words(source))
        x = self.decoder(self.words(target), memory, self.causal)
        logits = ops.matmul(x, self.words.embedding_table.T) * 8**-0.5
        return ops.cross_entropy(logits.reshape(-1, 20), wanted.reshape(-1))


class ResNet(nn.Cell):
    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, stride=2), nn.Conv2d(8, 8, 3)
        self.short = nn.Conv2d(8, 8, 1, stride=2)
        self.norms = nn.CellList([nn.BatchNorm2d(8) for _ in range(4)])
        self.pool, self.head = nn.MaxPool2d(2, 2), nn.Dense(8, 4)

    def construct(self, x, label):
        x = self.pool(ops.relu(self.norms[0](self.stem(x))))
        y = self.norms[2](self.second(ops.relu(self.norms[1](self.first(x)))))
        return ops.cross_entropy(self.head(ops.relu(y + self.norms[3](self.short(x))).mean((2, 3))), label)


class MobileNet(nn.Cell):
    """Widened, depthwise, narrowed, with squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.wide, self.depth, self.narrow = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, group=8), nn.Conv2d(8, 4, 1)
        self.norms = nn.CellList([nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(4)])
        self.squeeze, self.excite, self.head = nn.Dense(8, 4), nn.Dense(4, 8), nn.Dense(4, 4)
        self.relu6, self.hswish, self.hsigmoid = nn.ReLU6(), nn.HSwish(), nn.HSigmoid()

    def construct(self, x, label):
        y = self.relu6(self.norms[0](self.wide(x)))
        y = self.hswish(self.norms[1](self.depth(y)))
        gate = self.hsigmoid(self.excite(ops.relu(self.squeeze(y.mean((2, 3))))))
        y = self.norms[2](self.narrow(y * gate.reshape(ROWS, 8, 1, 1)))
        return ops.cross_entropy(self.head((x + y).mean((2, 3))), label)


class Vit(nn.Cell):
    def __init__(self):
        super().__init__()
        self.patches, self.first = (
            nn.Conv2d(3, 8, 2, stride=2, pad_mode="valid", has_bias=True),
            parameter(1, 1, 8, name="first"),
        )
        self.places, self.block, self.head = parameter(1, 5, 8, name="places"), Block(), nn.Dense(8, 4)

    def construct(self, x, label):
        x = self.patches(x).reshape(ROWS, 8, 4).transpose(0, 2, 1)
        x = ops.cat((ops.tile(self.first, (ROWS, 1, 1)), x), 1) + self.places
        return ops.cross_entropy(self.head(self.block(x)[:, 0]), label)


class Speech(nn.Cell):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, batch_first=True, bidirectional=True), nn.Dense(12, 6)

    def construct(self, x, text, lengths, text_lengths):
        x, _ = self.lstm(x)
        scores = ops.log_softmax(self.head(x), -1).transpose(1, 0, 2)
        return ops.ctc_loss(scores, text, lengths, text_lengths)[0].mean()


class TiedAutoencoder(nn.Cell):
    def __init__(self):
        super().__init__()
        self.encode, self.bias = nn.Dense(12, 8), parameter(12, name="bias")

    def construct(self, x):
        made = ops.matmul(ops.sigmoid(self.encode(x)), self.encode.weight) + self.bias
        return ((made - x) ** 2).mean() + self.encode.weight.abs().sum() * 1e-3


class Video(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.Dense(4, 4)
        self.second = nn.Conv3d(4, 4, 3)

    def construct(self, x, label):
        x = self.second(ops.relu(self.norm(self.conv(x))))
        return ops.cross_entropy(self.head(ops.relu(x).mean((2, 3, 4))), label)


FOUR = ids(4, ROWS)
IMAGES = normal(ROWS, 3, 8, 8)
CASES = {
    "clip": trained(Clip, normal(ROWS, 6), normal(ROWS, 5, seed=3), rules=columns("image", "text")),
    "graph attention": trained(
        GraphAttention, normal(ROWS, 6), ids(8, 24), ids(8, 24, seed=4), ids(3, ROWS), rules=columns("dense")
    ),
    "bert": trained(
        Bert,
        ids(20, ROWS, 6),
        Tensor((np.arange(6) < np.random.RandomState(3).randint(3, 7, (ROWS, 1))).astype(np.float32)),
        *(ids(6, ROWS, 2), ids(20, ROWS, 2, seed=5), ids(2, ROWS)),
        rules=columns("query", "key", "value", "up") | rows("out", "down"),
    ),
    "t5": trained(
        T5,
        *(ids(20, ROWS, 6), ids(20, ROWS, 5), ids(20, ROWS, 5, seed=3)),
        rules=columns("query", "key", "value", "up") | rows("out", "down"),
    ),
    "resnet": trained(
        ResNet, IMAGES, FOUR, rules=channels("stem", "first", "second"), settings={"optimizer_parallel": {"axis": "dp"}}
    ),
    "mobilenet": trained(MobileNet, normal(ROWS, 4, 6, 6), FOUR, rules=channels("wide", "depth")),
    "vit": trained(
        Vit,
        *(normal(ROWS, 3, 4, 4), FOUR),
        rules=columns("query", "key", "value", "up") | rows("out", "down"),
        settings={"optimizer_parallel": {"axis": "dp", "shard_accumulated_gradients": True}},
    ),
    "speech": trained(
        Speech,
        normal(ROWS, 7, 4),
        ids(5, ROWS, 3, first=1),
        Tensor([7] * ROWS, ms.int32),
        Tensor([3] * ROWS, ms.int32),
        rules=columns("head"),
    ),
    "tied autoencoder": trained(TiedAutoencoder, normal(ROWS, 12), rules=columns("encode")),
    "video": trained(Video, normal(ROWS, 2, 4, 4, 4), FOUR, rules=channels("second", kind="conv3d", dims=5)),
}
