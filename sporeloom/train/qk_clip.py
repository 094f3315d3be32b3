# SPDX-License-Identifier: Apache-2.0
"""QK-clip: weights of queries and keys are scaled down where a head's largest attention logit exceeds a threshold.

Source: MuonClip of Kimi K2, arXiv:2507.20534 section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.cells import ClippedAttention


class RowFactors(nn.Cell):
    """Factors of the rows of a matrix, or of a bias: (H,) -> (H * rows of a head, 1), or without the 1.

    Args:
        powers: of a head's factor, for each row of the head: 0, 0.5 or 1.
    """

    def __init__(self, powers: Sequence[float], is_bias: bool):
        super().__init__(auto_prefix=False)
        given = np.array([powers], np.float32)
        self.none, self.half, self.full = (Tensor((given == power).astype(np.float32)) for power in (0.0, 0.5, 1.0))
        self.shape = (-1,) if is_bias else (-1, 1)
        self.column, self.sqrt, self.reshape = ops.ExpandDims(), ops.Sqrt(), ops.Reshape()

    def construct(self, factors):
        factors = self.column(factors, 1)
        return self.reshape(self.none + self.sqrt(factors) * self.half + factors * self.full, self.shape)


class QKClip(nn.Cell):
    """After an update, the factor threshold / S of heads whose largest logit S exceeds the threshold goes into the weights
    and biases of its queries and keys (`ClippedAttention.head_powers`), so that its logits have that factor.

    Args:
        attentions: those whose largest logits a step counts, in that order.
    """

    def __init__(self, threshold: float, attentions: Sequence[ClippedAttention]):
        super().__init__(auto_prefix=False)
        self.threshold = Tensor(threshold, mstype.float32)
        scaled = [(index, *row) for index, cell in enumerate(attentions) for row in cell.head_powers()]
        self.indices = tuple(index for index, *_ in scaled)
        self.parameters = tuple(parameter for _, parameter, _ in scaled)
        self.rows = nn.CellList([RowFactors(powers, len(p.shape) == 1) for _, p, powers in scaled])
        self.maximum, self.assign = ops.Maximum(), ops.Assign()

    def construct(self, largest, updated, overflow=None):
        """largest: for each attention (H,); `updated`: the parameters are read after it. With `overflow`, a bool that the
        gradients were not finite, nothing changes where it is true."""
        done = ()
        for i in range(len(self.indices)):
            factors = self.threshold / self.maximum(largest[self.indices[i]], self.threshold)
            if overflow is not None:
                factors = ops.masked_fill(factors, overflow, 1.0)
            parameter = self.parameters[i]
            done = (*done, self.assign(parameter, ops.depend(parameter, updated) * self.rows[i](factors)))
        return done
