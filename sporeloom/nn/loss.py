# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of the next token."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype


class TokenLosses(nn.Cell):
    """-log softmax(logits)[label] of each token, plus z_loss * log(sum(exp(logits)))^2: (B*T, V), (B, T) -> (B*T,).

    Source: PanGu-alpha's CrossEntropyLoss; of the second term arXiv:2204.02311 section 5.
    """

    def __init__(self, z_loss: float = 0.0):
        super().__init__()
        self.z_loss = z_loss
        self.reshape = ops.Reshape()
        self.max, self.shift, self.exp, self.sum = ops.ReduceMax(keep_dims=True), ops.Sub(), ops.Exp(), ops.ReduceSum()
        self.one_hot, self.pick, self.pick_sum = ops.OneHot(), ops.Mul(), ops.ReduceSum()
        self.less_one, self.log, self.nll = ops.Sub(), ops.Log1p(), ops.Sub()
        self.on, self.off = Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)
        if z_loss:
            self.rows, self.unshift, self.square = ops.Reshape(), ops.Add(), ops.Square()
            self.scale_z, self.add_z = ops.Mul(), ops.Add()

    def of_tokens(self, logits, labels):
        labels = self.reshape(labels, (-1,))
        largest = ops.stop_gradient(self.max(logits, 1))  # (N, 1)
        shifted = self.shift(logits, largest)  # (N, V)
        # Log1p, for a CPU's Log rounds one way or another, by how often it ran: a resumed run would report another loss.
        log_sum = self.log(self.less_one(self.sum(self.exp(shifted), 1), 1.0))  # (N,)
        one_hot = self.one_hot(labels, logits.shape[1], self.on, self.off)
        loss = self.nll(log_sum, self.pick_sum(self.pick(shifted, one_hot), 1))
        if self.z_loss:
            z = self.unshift(log_sum, self.rows(largest, (-1,)))
            loss = self.add_z(loss, self.scale_z(self.square(z), self.z_loss))
        return loss


class CrossEntropy(TokenLosses):
    """sum over tokens of their losses * weights, PanGu-alpha's `mask / (sum(mask) + 1e-5)`.

    `further`: what else to add, (1,), as the losses of routers.
    """

    num_inputs = 0
    """Arrays of a batch besides labels and weights."""

    def __init__(self, z_loss: float = 0.0):
        super().__init__(z_loss)
        self.weigh, self.total = ops.Mul(), ops.ReduceSum()
        self.is_same, self.to_one = ops.Equal(), ops.Cast()
        self.further_sum, self.times_one, self.add_further = ops.ReduceSum(), ops.Mul(), ops.Add()

    def construct(self, logits, labels, weights, further=None):  # (B*T, V), (B, T), (B, T) -> ()
        loss = self.of_tokens(logits, labels)
        total = self.total(self.weigh(loss, self.reshape(weights, (-1,))), 0)
        if further is None:
            return total
        # Times a 1 that MindSpore cannot predict: a last stage whose gradient of `further` is a constant is not compiled.
        one = self.to_one(self.is_same(total, total), mstype.float32)
        return self.add_further(total, self.times_one(self.further_sum(further, 0), one))


class BatchTokenLosses(TokenLosses):
    """Losses (B, T) of the tokens of a batch, whatever their weights: to validate a model with."""

    num_inputs = 0

    def __init__(self):
        super().__init__()
        self.by_row = ops.Reshape()

    def construct(self, logits, labels, weights):  # (B*T, V), (B, T), (B, T) -> (B, T)
        return self.by_row(self.of_tokens(logits, labels), labels.shape)
