# SPDX-License-Identifier: Apache-2.0
"""Losses of preferences other than DPO: SimPO and CPO, ORPO, KTO and APO. See `objectives` for weights and metrics.

Names and formulas are TRL's. Sources: SimPO arXiv:2405.14734; CPO arXiv:2401.08417; ORPO arXiv:2403.07691; KTO
arXiv:2402.01306; APO arXiv:2408.06266.
"""

from mindspore import Tensor, ops
from mindspore import dtype as mstype

from sporeloom.nn.objectives import Pairs, Softplus, TokenObjective

MAX_MEAN_LOG_PROB = -1e-7
"""Upper bound of the mean log-probability whose odds ORPO computes: those of probability 1 are infinite."""


class PairObjective(TokenObjective):
    """Base of losses of pairs without a reference: of every two rows the first is preferred.

    Each pair's weight, a share of all pairs, stands at every token that is trained on of both rows.
    """

    metrics = (
        *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    )

    def __init__(self, beta: float, has_means: bool):
        super().__init__()
        self.beta, self.has_means = beta, has_means
        self.keep, self.row_sum, self.length = ops.Mul(), ops.ReduceSum(), ops.ReduceSum()
        self.at_least, self.divide, self.row_weight = ops.Maximum(), ops.Div(), ops.ReduceMax()
        self.pair, self.pair_weights = Pairs(), Pairs()
        self.softplus, self.share_mul, self.add_up = Softplus(), ops.Mul(), ops.ReduceSum()

    def sides(self, log_probs, weights):
        """Sum or mean of the log-probabilities of the first and of the second rows (B/2,), and shares of the pairs."""
        mask = self.mask(weights)
        values = self.row_sum(self.keep(log_probs, mask), 1)
        if self.has_means:
            values = self.divide(values, self.at_least(self.length(mask, 1), 1.0))
        chosen, rejected = self.pair(values)
        share, _ = self.pair_weights(self.row_weight(weights, 1))
        return chosen, rejected, share

    def numbers(self, chosen, rejected, share):
        """Metrics of the pairs."""
        margin = chosen - rejected
        is_right = ops.cast(margin > 0, mstype.float32)
        found = ()
        for number in (self.beta * chosen, self.beta * rejected, self.beta * margin, is_right, chosen, rejected):
            found = (*found, (number * share).sum())
        return found


class SimPO(PairObjective):
    """-log sigmoid(beta (mean log p of the first - of the second) - gamma).

    Args:
        has_means: False: sums over tokens in place of means, as CPO's sigmoid loss.
        label_smoothing: probability that a preference is wrong.
    """

    def __init__(self, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, has_means: bool = True):
        super().__init__(beta, has_means)
        self.gamma, self.smoothing = gamma, label_smoothing

    def of(self, log_probs, weights):
        chosen, rejected, share = self.sides(log_probs, weights)
        margin = self.beta * (chosen - rejected) - self.gamma
        losses = self.softplus(-margin)
        if self.smoothing:
            losses = (1.0 - self.smoothing) * losses + self.smoothing * self.softplus(margin)
        loss = self.add_up(self.share_mul(losses, share), 0)
        return loss, self.numbers(chosen, rejected, share)


class ORPO(PairObjective):
    """Negative log-likelihood of the preferred texts - beta * log sigmoid(log odds of the first - of the second), odds of the
    mean log-probability of a row's tokens.

    One more input (B, T): weights of the tokens in the likelihood, those of prompts included.
    """

    metrics = (*PairObjective.metrics, "nll", "log_odds")
    num_inputs = 1

    def __init__(self, beta: float = 0.1):
        super().__init__(beta, True)
        self.exp, self.log, self.at_most, self.likelihood = ops.Exp(), ops.Log(), ops.Minimum(), ops.Mul()
        self.expm1 = ops.Expm1()

    def of(self, log_probs, weights, likelihood_weights):
        chosen, rejected, share = self.sides(log_probs, weights)
        log_odds = self.log_odds(chosen) - self.log_odds(rejected)
        nll = -self.add_up(self.likelihood(log_probs, likelihood_weights), (0, 1))
        loss = nll + self.beta * self.add_up(self.share_mul(self.softplus(-log_odds), share), 0)
        return loss, (*self.numbers(chosen, rejected, share), nll, (log_odds * share).sum())

    def log_odds(self, log_prob):
        """log(p / (1 - p))"""
        log_prob = self.at_most(log_prob, MAX_MEAN_LOG_PROB)
        return log_prob - self.log(-self.expm1(log_prob))


class KTO(TokenObjective):
    """weight * (1 - sigmoid(+-beta (r - kl))) of each row, + where it is desired; r = log p - log reference p of its tokens.

    Three more inputs (B, T), of which a row's value stands at its trained tokens: log-probabilities of the reference, whether
    it is desired (1 or 0), and the KL divergence, not negative. Each row's weight, a share of all rows, stands there as well.

    Args:
        desirable_weight: of rows that are desired; `undesirable_weight`: of the others.
        loss_type: kto, or apo_zero_unpaired, which has no KL divergence.
    """

    metrics = ("rewards/desired", "rewards/undesired", "kl")
    num_inputs = 3

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        loss_type: str = "kto",
    ):
        super().__init__()
        self.beta, self.loss_type = beta, loss_type
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight
        self.keep, self.row_sum, self.row_max = ops.Mul(), ops.ReduceSum(), ops.ReduceMax()
        self.keep_reference, self.reference_sum, self.ratio = ops.Mul(), ops.ReduceSum(), ops.Sub()
        self.softplus, self.exp, self.share_mul, self.add_up = Softplus(), ops.Exp(), ops.Mul(), ops.ReduceSum()
        self.one = Tensor(1.0, mstype.float32)

    def of(self, log_probs, weights, reference, desired, kl):
        mask = self.mask(weights)
        policy = self.row_sum(self.keep(log_probs, mask), 1)  # (B,)
        reward = self.ratio(policy, self.reference_sum(self.keep_reference(reference, mask), 1))
        share, is_desired = self.row_max(weights, 1), self.row_max(desired * mask, 1)
        divergence = self.row_max(kl * mask, 1)
        margin = reward if self.loss_type == "apo_zero_unpaired" else reward - divergence
        weight = self.desirable_weight * is_desired + self.undesirable_weight * (self.one - is_desired)
        scaled = self.beta * margin * (2.0 * is_desired - self.one)
        losses = weight * self.exp(-self.softplus(scaled))  # 1 - sigmoid
        loss = self.add_up(self.share_mul(losses, share), 0)
        rewards = self.beta * reward * share
        numbers = ((rewards * is_desired).sum(), (rewards * (self.one - is_desired)).sum(), (divergence * share).sum())
        return loss, numbers
