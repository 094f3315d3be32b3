# SPDX-License-Identifier: Apache-2.0
"""Divergences of a student's probabilities from a teacher's: forward and reverse KL, generalized Jensen-Shannon.

Names and formulas are TRL's. Source: generalized knowledge distillation arXiv:2306.13649.
"""

import math

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.models.cells import PartlyForwardCell
from sporeloom.nn.loss import TokenLosses
from sporeloom.nn.objectives import Objective

MAX_LOG_SUM = -1e-7
"""Upper bound of the log-probability of the supported tokens: the tail keeps a probability above 0."""


class LogSoftmax(nn.Cell):
    """Log-probabilities of logits (..., V) from operators that can be sharded over V."""

    def __init__(self):
        super().__init__()
        self.largest, self.sum, self.exp, self.log1p = ops.ReduceMax(True), ops.ReduceSum(True), ops.Exp(), ops.Log1p()

    def construct(self, logits):
        shifted = logits - ops.stop_gradient(self.largest(logits, -1))
        return shifted - self.log1p(self.sum(self.exp(shifted), -1) - 1.0)  # see `TokenLosses` why not Log


class Divergence(nn.Cell):
    """Divergence of each token: logits (N, V) of student and teacher -> (N,); the teacher has no gradient.

    With p of the student and q of the teacher: `beta` 0 is the forward KL(q || p), 1 the reverse KL(p || q), else
    beta KL(q || m) + (1 - beta) KL(p || m) with m = (1 - beta) p + beta q.

    Args:
        temperature: that both logits are divided by.
        top_k: number of tokens that are compared, 0: all. Those of the teacher's largest logits for beta 0, of the student's
            for beta 1, of both otherwise; the choice has no gradient.
        has_tail: with `top_k`, the other tokens count as one more; otherwise probabilities of the compared ones are divided
            by their sum.
    """

    def __init__(self, beta: float = 0.5, temperature: float = 1.0, top_k: int = 0, has_tail: bool = True):
        super().__init__()
        assert 0 <= beta <= 1, beta
        self.beta, self.cool, self.top_k, self.has_tail = beta, 1.0 / temperature, top_k, has_tail
        self.student_log_probs, self.teacher_log_probs = LogSoftmax(), LogSoftmax()
        self.sum, self.exp, self.log, self.expm1 = ops.ReduceSum(True), ops.Exp(), ops.Log(), ops.Expm1()
        self.log1p = ops.Log1p()
        self.largest, self.at_most, self.larger = ops.TopK(sorted=True), ops.Minimum(), ops.Maximum()
        self.total, self.scatter = ops.ReduceSum(), ops.tensor_scatter_elements
        self.log_beta, self.log_rest = (math.log(share) if share else 0.0 for share in (beta, 1 - beta))

    def construct(self, student, teacher):
        student, teacher = student * self.cool, ops.stop_gradient(teacher * self.cool)
        log_p, log_q = self.student_log_probs(student), self.teacher_log_probs(teacher)
        if not self.top_k:
            return self.total(self.terms(log_p, log_q), -1)
        support = self.support(student, teacher)
        p_sum, q_sum = self.log_sum(log_p, support), self.log_sum(log_q, support)
        if not self.has_tail:
            return self.total(self.terms(log_p - p_sum, log_q - q_sum) * support, -1)
        tail = self.terms(self.rest(p_sum), self.rest(q_sum))
        return self.total(self.terms(log_p, log_q) * support, -1) + self.total(tail, -1)

    def terms(self, log_p, log_q):
        """Contribution of each token."""
        if self.beta == 0:
            return self.exp(log_q) * (log_q - log_p)
        if self.beta == 1:
            return self.exp(log_p) * (log_p - log_q)
        first, second = log_p + self.log_rest, log_q + self.log_beta
        largest = ops.stop_gradient(self.larger(first, second))
        log_m = largest + self.log1p((self.exp(first - largest) - 1.0) + self.exp(second - largest))
        of_teacher = self.exp(log_q) * (log_q - log_m)
        return self.beta * of_teacher + (1.0 - self.beta) * self.exp(log_p) * (log_p - log_m)

    def support(self, student, teacher):
        """(N, V), 1 where a token is compared."""
        found = self.of_largest(teacher) if self.beta != 1 else self.of_largest(student)
        if 0 < self.beta < 1:
            found = self.larger(found, self.of_largest(student))
        return found

    def of_largest(self, logits):
        logits = ops.stop_gradient(logits)
        _, places = self.largest(logits, self.top_k)
        ones = ops.ones_like(ops.cast(places, mstype.float32))
        return self.scatter(ops.zeros_like(ops.cast(logits, mstype.float32)), places, ones, -1)

    def log_sum(self, log_probs, support):  # (N, V) -> (N, 1)
        return self.log(self.sum(self.exp(log_probs) * support, -1))

    def rest(self, log_sum):
        """log(1 - exp(log_sum))"""
        return self.log(-self.expm1(self.at_most(log_sum, MAX_LOG_SUM)))


class Distillation(Objective):
    """Sum of each token's divergence from the teacher times its weight. While it does not train: the divergences, (B, T).

    Logits (B*T, V) of student and teacher, labels (B, T), for the metrics, and weights (B, T).
    """

    metrics = ("nll", "teacher_nll")

    def __init__(self, divergence: Divergence):
        super().__init__()
        self.divergence, self.by_row = divergence, ops.Reshape()
        self.share_mul, self.add_up = ops.Mul(), ops.ReduceSum()
        self.student_losses, self.teacher_losses = TokenLosses(), TokenLosses()

    def construct(self, student, teacher, labels, weights):
        found = self.by_row(self.divergence(student, teacher), labels.shape)
        if not self.training:
            return found
        loss, numbers = self.add_up(self.share_mul(found, weights), (0, 1)), ()
        if self.counts:
            for losses, logits in ((self.student_losses, student), (self.teacher_losses, teacher)):
                nll = self.by_row(losses.of_tokens(ops.stop_gradient(logits), labels), labels.shape)
                numbers = (*numbers, (nll * weights).sum())
        return self.counted(loss, numbers)


class DecoderWithTeacher(nn.Cell, PartlyForwardCell):
    """Training network of a student, with its frozen teacher on the same tokens; see `DecoderWithLoss`. Sharding rules, which
    are ends of paths, apply to both."""

    num_inputs = 0
    without_backward = ("teacher",)
    """Paths of Cells whose layers are neither recomputed nor offloaded."""

    def __init__(self, model: nn.Cell, teacher: nn.Cell, loss: Distillation):
        super().__init__()
        self.model, self.teacher, self.loss = model, teacher, loss
        for parameter in teacher.get_parameters():
            parameter.requires_grad = False

    def construct(self, tokens, labels, positions, loss_weights, *more):
        dropout_keys = more[0] if more else None
        logits, _ = self.model.logits_and_losses(tokens, positions, None, None, dropout_keys)
        return self.loss(logits, self.teacher(tokens, positions), labels, loss_weights)
