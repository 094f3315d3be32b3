# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average (EMA) of the weights, updated in the training step and sharded as they are."""

from __future__ import annotations

from mindspore import nn, ops

from sporeloom.checkpoint.contents import AVERAGES
from sporeloom.train.optim import optimizer_number, set_number

_average = ops.MultitypeFuncGraph("average")


@_average.register("Tensor", "Tensor", "Tensor")
def _average_of(rate, average, weight):
    return ops.assign_sub(average, rate * (average - weight))


class WithAverages(nn.Cell):
    """An optimizer, after which average = decay * average + (1 - decay) * weight, in float32.

    The averages begin as zeros: the caller gives them the initial weights. A step that updates no weight updates no average.
    """

    def __init__(self, optimizer, decay):
        super().__init__(auto_prefix=False)
        self.optimizer, self.decay = optimizer, decay
        self.parameters = optimizer.parameters
        self.averages = self.parameters.clone(prefix=AVERAGES.removesuffix("."), init="zeros")
        for average in self.averages:
            average.requires_grad = False
        self.rate = optimizer_number("ema_rate")
        self.map = ops.HyperMap()

    def prepare(self, update: int, learning_rate: float) -> None:
        """Set the numbers of an update, counted from 1; steps that update nothing are not counted."""
        self.optimizer.prepare(update, learning_rate)
        set_number(self.rate, 1.0 - self.decay)

    def construct(self, gradients, overflow=None):
        """With `overflow`, a bool that the gradients were not finite, nothing changes where it is true."""
        rate = self.rate
        if overflow is None:
            updated = self.optimizer(gradients)
        else:
            updated = self.optimizer(gradients, overflow)
            rate = ops.masked_fill(rate, overflow, 0.0)
        weights = ops.depend(self.parameters, updated)
        return self.map(ops.partial(_average, rate), self.averages, weights)
