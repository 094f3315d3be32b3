# SPDX-License-Identifier: Apache-2.0
"""What a layer of experts costs on one CPU process beside the products in it: a forward and backward pass of both, in turn.

8 experts, 2 for each token, one sequence of 512 tokens, capacity factor 1: each expert has 128 rows.
"""

import statistics
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import decoder_specs
from sporeloom.nn.moe import ExpertMLPs, MoE
from sporeloom.nn.routing import Router

TOKENS, WIDTHS, REPEATS = 512, ((512, 2048), (1024, 4096)), 15


def experts_of(config):
    """Parameters of the experts of the first layer."""
    return decoder_specs(config).within(f"{config.layers[0]}.mlp")


class Products(nn.Cell):
    """The experts on rows that lie ready, and the product of the router."""

    def __init__(self, config):
        super().__init__()
        specs = experts_of(config)
        self.experts = ExpertMLPs(config, specs.within("experts"), ms.float32)
        self.router = Router(config, specs.within("router"))

    def construct(self, rows, x):
        return ops.ReduceSum()(self.experts(rows)) + ops.ReduceSum()(self.router(x)[1])


class Layer(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.layer = MoE(config, experts_of(config), ms.float32, 0)

    def construct(self, x, tokens, shares):
        y, losses = self.layer(x, tokens, shares)
        return ops.ReduceSum()(y) + losses[0]


class Step(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net, self.weights = net, ms.ParameterTuple(net.trainable_params())
        self.grad = ops.GradOperation(get_all=True, get_by_list=True)

    def construct(self, *inputs):
        return self.grad(self.net, self.weights)(*inputs)


def seconds(step, inputs):
    start = time.perf_counter()
    step(*inputs)[0][0].asnumpy()
    return time.perf_counter() - start


def main():
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    print("| D | F | products | layer | layer / products |\n|---|---|---|---|---|")
    for d, ffn in WIDTHS:
        experts = {"num_experts": 8, "experts_per_token": 2, "capacity_factor": 1.0, "normalize": "before_drop"}
        config = ModelConfig(
            vocab_size=64,
            hidden_size=d,
            num_layers=1,
            num_heads=1,
            ffn_hidden_size=ffn,
            dropout_rate=0.0,
            query_layer=False,
            experts={**experts, "balance_loss": 0.01, "router_z_loss": 0.001},
        )
        rng = np.random.default_rng(0)
        x = Tensor(rng.normal(size=(TOKENS, d)).astype(np.float32))
        rows = Tensor(rng.normal(size=(8, TOKENS * 2 // 8, d)).astype(np.float32))
        tokens, shares = Tensor(np.zeros((1, TOKENS), np.int32)), Tensor(np.ones(1, np.float32))
        runs = [(Step(Products(config)), (rows, x)), (Step(Layer(config).set_train()), (x, tokens, shares))]
        for run in runs:
            seconds(*run)
        times = np.array([[seconds(*run) for run in runs] for _ in range(REPEATS)])
        products, layer = (statistics.median(column) for column in times.T)
        ratio = statistics.median(times[:, 1] / times[:, 0])
        print(f"| {d} | {ffn} | {1e3 * products:.0f} ms | {1e3 * layer:.0f} ms | {ratio:.2f} |")


if __name__ == "__main__":
    main()
