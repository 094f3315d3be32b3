# SPDX-License-Identifier: Apache-2.0
"""A recurrent network in a loop of its own: gradients by `ms.value_and_grad`, loss and update in one `ms.jit` function.

python examples/own_loop.py
msrun --worker_num=4 --local_worker_num=4 --join=True examples/own_loop.py tp
"""

import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from sporeloom import auto_parallel, is_log_rank


class Tagger(nn.Cell):
    """Words (batch, length) -> logits of 4 tags (batch * length, 4)."""

    def __init__(self):
        super().__init__()
        self.words, self.gru = nn.Embedding(50, 16), nn.GRU(16, 16, batch_first=True)
        self.up, self.act, self.down = nn.Dense(16, 64), nn.ReLU(), nn.Dense(64, 4)

    def construct(self, words):
        states, _ = self.gru(self.words(words))
        return self.down(self.act(self.up(states.reshape(-1, 16))))


ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
net = Tagger()
if len(sys.argv) > 1:  # the one line; with rules, columns and rows of two products are sharded over tp
    rules = {"up.matmul": [["dp", None], ["tp", None]], "down.matmul": [["dp", "tp"], [None, "tp"]]}
    net = auto_parallel(net, mesh={"dp": 2, "tp": 2}, rules=rules)

net.set_train()
loss_of, optimizer = nn.CrossEntropyLoss(), nn.Adam(net.trainable_params(), 1e-2)


def forward(words, tags):
    return loss_of(net(words), tags)


gradients_of = ms.value_and_grad(forward, None, optimizer.parameters)


@ms.jit
def train_step(words, tags):
    loss, gradients = gradients_of(words, tags)
    return ops.depend(loss, optimizer(gradients))


rng = np.random.RandomState(0)
words = rng.randint(0, 50, (8, 6)).astype(np.int32)
for i in range(6):
    loss = train_step(Tensor(words), Tensor((words % 4).reshape(-1)))
    if is_log_rank():
        print(f"step {i + 1} loss {float(loss.asnumpy()):.6f}", flush=True)
