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


class Averages(nn.Cell):
    """After an update, average = decay * average + (1 - decay) * weight, in float32.

    The averages begin as zeros: the caller gives them the initial weights. A step that updates no weight updates no average.

    Args:
        weights: ParameterTuple.
    """

    def __init__(self, weights, decay):
        super().__init__(auto_prefix=False)
        self.weights, self.decay = weights, decay
        self.averages = weights.clone(prefix=AVERAGES.removesuffix("."), init="zeros")
        for average in self.averages:
            average.requires_grad = False
        self.rate = optimizer_number("ema_rate")
        self.map = ops.HyperMap()

    def prepare(self) -> None:
        """Set the number of an update; steps that update nothing are not counted."""
        set_number(self.rate, 1.0 - self.decay)

    def construct(self, updated, overflow=None):
        """`updated`: the weights are read after it. With `overflow`, a bool that the gradients were not finite, nothing
        changes where it is true."""
        rate = self.rate if overflow is None else ops.masked_fill(self.rate, overflow, 0.0)
        return self.map(ops.partial(_average, rate), self.averages, ops.depend(self.weights, updated))
