# SPDX-License-Identifier: Apache-2.0
"""Networks of layers, of which a pipeline makes stages, and one whose products are functions."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


class GatedBlock(nn.Cell):
    def __init__(self):
        super().__init__()
        self.mix = nn.Dense(12, 12)
        self.gate, self.up, self.down = nn.Dense(12, 32), nn.Dense(12, 32), nn.Dense(32, 12)
        self.act = nn.SiLU()

    def construct(self, x):
        x = self.mix(x)
        return self.down(self.act(self.gate(x)) * self.up(x))


class Gated(nn.Cell):
    """Two blocks of a gated MLP and a square product, whose pairs `auto` finds."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([GatedBlock(), GatedBlock()])
        self.mix, self.head = nn.Dense(12, 12), nn.Dense(12, 5)
        self.loss = nn.CrossEntropyLoss()

    def construct(self, x, label):
        for block in self.blocks:
            x = x + block(x)
        return self.loss(self.head(self.mix(x)), label)


class TiedOutside(Gated):
    """A weight of the first stage is used again, in no Cell of the last one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(12, 12)

    def construct(self, x, label):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.loss(ops.matmul(x, self.first.weight.T), label)


class Borrowed(Gated):
    """The first stage uses a weight of the last one, too."""

    def construct(self, x, label):
        x = ops.matmul(x, self.blocks[1].mix.weight)
        for block in self.blocks:
            x = x + block(x)
        return self.loss(self.head(self.mix(x)), label)


class Functional(nn.Cell):
    """Products that are not attributes."""

    def __init__(self):
        super().__init__()
        rng = np.random.RandomState(4)
        self.up = ms.Parameter(Tensor(rng.randn(12, 32).astype(np.float32) * 0.3))
        self.down = ms.Parameter(Tensor(rng.randn(32, 5).astype(np.float32) * 0.2))

    def construct(self, x, label):
        return ops.cross_entropy(ops.matmul(ops.relu(ops.matmul(x, self.up)), self.down), label)
