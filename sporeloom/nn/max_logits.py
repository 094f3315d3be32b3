# SPDX-License-Identifier: Apache-2.0
"""The largest attention logit of each head, which a training step returns and clips by (`sporeloom.train.qk_clip`)."""

from mindspore import Parameter, nn, ops

from sporeloom.models.cells import CountingCell
from sporeloom.nn.counter import Counter


class MaxLogits(nn.Cell, CountingCell):
    """Counts the largest logit of each head: over the tokens of a batch, padding aside, and all that each attends to.

    Microbatches do not add these up; the largest is that of the step.
    """

    kind = "max_logits"

    def __init__(self, num_heads: int):
        super().__init__()
        self.of_token, self.hide, self.of_head = ops.ReduceMax(), ops.Add(), ops.ReduceMax()
        self.counter = Counter(num_heads)

    def attach_counter(self, name: str) -> Parameter:
        """Let training steps count. Returns the parameter of that name, whose gradient is the count."""
        return self.counter.attach(name)

    def construct(self, logits, padding):
        """logits: (B, H, T, S), with a mask; padding: (B, 1, T), a mask. Returns (1,), 0."""
        largest = self.of_token(ops.stop_gradient(logits), 3)  # (B, H, T)
        return self.counter.carry(self.of_head(self.hide(largest, padding), (0, 2)))
