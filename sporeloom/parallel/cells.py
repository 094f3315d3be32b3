# SPDX-License-Identifier: Apache-2.0
"""Cells around a custom network, or around a function that uses one."""

from __future__ import annotations

import mindspore as ms
from mindspore import ParameterTuple, nn, ops

from sporeloom.core.errors import ConfigError


class ParallelNetwork(nn.Cell):
    """Result of `auto_parallel`: `network`, whose graph is sharded once it is compiled."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def __call__(self, *args, **kwargs):
        check_mode()
        return super().__call__(*args, **kwargs)

    def construct(self, *args, **kwargs):
        return self.network(*args, **kwargs)


def check_mode():
    """
    Raises:
        ConfigError: Cells are not compiled.
    """
    if ms.get_context("mode") != ms.GRAPH_MODE:
        raise ConfigError("a parallel network runs in graph mode: call ms.set_context(mode=ms.GRAPH_MODE) before it")


class FunctionCell(nn.Cell):
    """A function as a Cell, with the Cells that it uses, which own its parameters, and parameters that it uses besides."""

    def __init__(self, function, cells, parameters=()):
        super().__init__(auto_prefix=False)
        self.function = function
        for number, cell in enumerate(cells):
            setattr(self, f"cell_{number}", cell)
        for number, parameter in enumerate(parameters):
            setattr(self, f"parameter_{number}", parameter)

    def construct(self, *inputs, **named):
        return self.function(*inputs, **named)


class Gradients(nn.Cell):
    """Compute loss and gradients of a network."""

    def __init__(self, network, weights):
        super().__init__(auto_prefix=False)
        self.network, self.weights = network.set_grad(), ParameterTuple(weights)
        self.trained = {weight.name for weight in weights}
        self.grad = ops.GradOperation(get_by_list=True)

    def construct(self, *inputs):
        return self.network(*inputs), self.grad(self.network, self.weights)(*inputs)
