# SPDX-License-Identifier: Apache-2.0
"""Your own network made parallel with one line. It knows nothing of this project, and trains the same on one device:

python examples/own_network.py
msrun --worker_num=4 --local_worker_num=4 --join=True examples/own_network.py examples/own_network_dp2_tp2.yaml
"""

import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from sporeloom import auto_parallel, is_log_rank


class Block(nn.Cell):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm((width,))
        self.up = nn.Dense(width, 4 * width)
        self.gelu = ops.GeLU()
        self.down = nn.Dense(4 * width, width)
        self.add = ops.Add()

    def construct(self, x):
        return self.add(x, self.down(self.gelu(self.up(self.norm(x)))))


class Regression(nn.Cell):
    """Inputs and targets, each (batch, width) -> mean squared error."""

    def __init__(self, width=32, num_blocks=4):
        super().__init__()
        self.blocks = nn.CellList([Block(width) for _ in range(num_blocks)])
        self.head = nn.Dense(width, width)
        self.sub, self.square, self.mean = ops.Sub(), ops.Square(), ops.ReduceMean()

    def construct(self, x, target):
        for block in self.blocks:
            x = block(x)
        return self.mean(self.square(self.sub(self.head(x), target)))


ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
net = Regression()
if len(sys.argv) > 1:
    net = auto_parallel(net, sys.argv[1])  # the one line

step = nn.TrainOneStepCell(net, nn.AdamWeightDecay(net.trainable_params(), learning_rate=3e-3)).set_train()
rng = np.random.RandomState(0)
x = rng.randn(16, 32).astype(np.float32)
for i in range(6):
    loss = step(Tensor(x), Tensor(np.sin(x)))
    if is_log_rank():  # of several processes one
        print(f"step {i + 1} loss {float(loss.asnumpy()):.6f}", flush=True)
