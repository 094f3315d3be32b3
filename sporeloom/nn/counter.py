# SPDX-License-Identifier: Apache-2.0
"""Metrics that a training step returns besides its loss."""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer


class Counter(nn.Cell):
    """Returns metrics from a training step: the gradient of `count`, always 0 itself, is the counted value.

    What gradients are, over microbatches, replicas and stages, these numbers are too: sums over the batch. A training step
    attaches them; without it nothing is counted.

    Args:
        length: how many numbers.
    """

    def __init__(self, length: int):
        super().__init__()
        self.length = length
        self.mul, self.sum = ops.Mul(), ops.ReduceSum(True)

    def attach(self, name: str) -> Parameter:
        """Begin to count. Returns `count`, which gets that name: it does not belong to the model's weights."""
        zeros = initializer("zeros", (self.length,), mstype.float32)
        self.count = Parameter(zeros, name=name, parallel_optimizer=False)
        return self.count

    def carry(self, numbers):  # (length,) -> (1,), 0
        return self.sum(self.mul(self.count, ops.stop_gradient(numbers)), 0)
