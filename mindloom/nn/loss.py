# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of the next token."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype


class CrossEntropy(nn.Cell):
    """sum over tokens of -log(softmax(logits)[label] + 1e-24) * weight.

    Source: PanGu-alpha's CrossEntropyLoss, whose `mask / (sum(mask) + 1e-5)` is the weight here.
    """

    def __init__(self):
        super().__init__()
        self.reshape = ops.Reshape()
        self.max, self.shift, self.exp, self.sum = ops.ReduceMax(keep_dims=True), ops.Sub(), ops.Exp(), ops.ReduceSum()
        self.one_hot, self.pick, self.pick_sum = ops.OneHot(), ops.Mul(), ops.ReduceSum()
        self.div, self.add, self.log, self.neg = ops.Div(), ops.Add(), ops.Log(), ops.Neg()
        self.weigh, self.total = ops.Mul(), ops.ReduceSum()
        self.on, self.off = Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)

    def construct(self, logits, labels, weights):  # (B*T, V), (B, T), (B, T) -> ()
        labels, weights = self.reshape(labels, (-1,)), self.reshape(weights, (-1,))
        exp = self.exp(self.shift(logits, ops.stop_gradient(self.max(logits, 1))))  # (N, V)
        one_hot = self.one_hot(labels, logits.shape[1], self.on, self.off)
        prob = self.div(self.pick_sum(self.pick(exp, one_hot), 1), self.sum(exp, 1))  # (N,)
        nll = self.neg(self.log(self.add(prob, 1e-24)))
        return self.total(self.weigh(nll, weights), 0)
