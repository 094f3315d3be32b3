# SPDX-License-Identifier: Apache-2.0
"""Losses of preferences and rewards, as sums over a batch.

Every one takes the model's output for each token, (B, T), and `weights` (B, T): 0 where a token is not trained on,
elsewhere its share of the loss. The weights hold the denominators of the global batch, so the losses of its microbatches
add up. Each counts metrics, see `Counter`; `metrics` names them.

Names and formulas are TRL's. Sources: DPO arXiv:2305.18290; IPO arXiv:2310.12036; robust DPO arXiv:2403.00409; PPO
arXiv:1707.06347; GRPO arXiv:2402.03300; DAPO arXiv:2503.14476; Dr. GRPO arXiv:2503.20783; sequence ratios arXiv:2507.18071.
"""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.cells import CountingCell
from sporeloom.nn.counter import Counter
from sporeloom.nn.loss import TokenLosses


class Objective(nn.Cell, CountingCell):
    """Base of all objectives: a mask from the weights, and metrics.

    Subclasses have `of(values, weights, *more)`, the loss and its numbers. While it does not train an objective gives the
    values, (B, T): what other models are compared with.
    """

    metrics: tuple[str, ...] = ()
    num_inputs = 0
    """Arrays (B, T) of a batch besides labels and weights."""

    def __init__(self):
        super().__init__()
        self.counter, self.counts = Counter(len(self.metrics)), False
        self.is_trained, self.to_float, self.join, self.add_count = ops.NotEqual(), ops.Cast(), ops.Stack(), ops.Add()
        self.count_sum = ops.ReduceSum()

    def attach_counter(self, name: str) -> Parameter:
        """Let training steps count. Returns the parameter of that name, whose gradient is the count."""
        self.counts = True
        return self.counter.attach(name)

    def mask(self, weights):  # (B, T) -> (B, T), 1 where a token is trained on
        return self.to_float(self.is_trained(weights, 0.0), mstype.float32)

    def counted(self, loss, numbers):
        """Return the loss, with the metrics attached."""
        if not self.counts:
            return loss
        return self.add_count(loss, self.count_sum(self.counter.carry(self.join(numbers)), 0))


class TokenObjective(Objective):
    """An objective of the log-probabilities of tokens: of logits (B*T, V) and labels (B, T)."""

    def __init__(self):
        super().__init__()
        self.loss, self.by_row, self.negative = TokenLosses(), ops.Reshape(), ops.Neg()

    def log_probs(self, logits, labels):  # (B*T, V), (B, T) -> (B, T)
        return self.negative(self.by_row(self.loss.of_tokens(logits, labels), labels.shape))

    def construct(self, logits, labels, weights, *more):
        log_probs = self.log_probs(logits, labels)
        if not self.training:
            return log_probs
        loss, numbers = self.of(log_probs, weights, *more)
        return self.counted(loss, numbers)


class ValueObjective(Objective):
    """An objective of the values that a model with a value head gives each token, (B*T, 1). Labels are not used."""

    def __init__(self):
        super().__init__()
        self.by_row = ops.Reshape()

    def construct(self, values, labels, weights, *more):
        values = self.by_row(values, labels.shape)
        if not self.training:
            return values
        loss, numbers = self.of(values, weights, *more)
        return self.counted(loss, numbers)


class Pairs(nn.Cell):
    """Split values of rows (B,), of which every two belong together, into those of the first (B/2,) and of the
    second ones."""

    def __init__(self):
        super().__init__()
        self.reshape, self.pick_first, self.pick_second = ops.Reshape(), ops.Mul(), ops.Mul()
        self.first_sum, self.second_sum = ops.ReduceSum(), ops.ReduceSum()
        self.first, self.second = (Tensor(np.array([row], np.float32)) for row in ((1, 0), (0, 1)))

    def construct(self, x):
        x = self.reshape(x, (-1, 2))
        first, second = self.pick_first(x, self.first), self.pick_second(x, self.second)
        return self.first_sum(first, 1), self.second_sum(second, 1)


class Softplus(nn.Cell):
    """log(1 + exp(x)), rounded in one way: a CPU's `ops.Softplus` has two, by how often it ran. See `TokenLosses`."""

    def __init__(self):
        super().__init__()
        self.relu, self.log = ops.ReLU(), ops.Log1p()

    def construct(self, x):
        # A constant that cancels out: the gradient is right also where x is 0.
        largest = ops.stop_gradient(self.relu(x))
        return largest + self.log((ops.exp(-largest) - 1.0) + ops.exp(x - largest))


class Preference(TokenObjective):
    """DPO: of every two rows the first is preferred. Rewards are beta * (log p - log reference p) of a row's tokens.

    One more input: the reference's log-probabilities (B, T). Each pair's weight, a share of all pairs, stands at every token
    that is trained on of both rows.

    Args:
        loss_type: sigmoid, hinge, ipo (of means over tokens; `ipo_sum`: of sums) or robust.
        label_smoothing: probability that a preference is wrong.
    """

    metrics = (
        *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    )
    num_inputs = 1

    def __init__(self, loss_type: str = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0):
        super().__init__()
        self.loss_type, self.beta, self.smoothing = loss_type, beta, label_smoothing
        self.keep, self.keep_reference, self.row_sum, self.reference_sum = (
            ops.Mul(),
            ops.Mul(),
            ops.ReduceSum(),
            ops.ReduceSum(),
        )
        self.length, self.at_least, self.divide, self.pair_means = ops.ReduceSum(), ops.Maximum(), ops.Div(), Pairs()
        self.row_weight, self.ratio = ops.ReduceMax(), ops.Sub()
        self.pair, self.pair_weights, self.pair_log_probs = Pairs(), Pairs(), Pairs()
        self.margin, self.share_mul, self.add_up = ops.Sub(), ops.Mul(), ops.ReduceSum()
        self.softplus, self.relu, self.squared = Softplus(), ops.ReLU(), ops.Square()

    def of(self, log_probs, weights, reference):
        mask = self.mask(weights)
        policy = self.row_sum(self.keep(log_probs, mask), 1)  # (B,)
        ratio = self.ratio(policy, self.reference_sum(self.keep_reference(reference, mask), 1))
        chosen, rejected = self.pair(ratio)  # (B/2,)
        reward = self.margin(chosen, rejected)
        share, _ = self.pair_weights(self.row_weight(weights, 1))
        margin = reward
        if self.loss_type == "ipo":
            first, second = self.pair_means(self.divide(ratio, self.at_least(self.length(mask, 1), 1.0)))
            margin = first - second
        loss = self.add_up(self.share_mul(self.of_margin(margin), share), 0)
        is_right = ops.cast(reward > 0, mstype.float32)
        chosen_log_probs, rejected_log_probs = self.pair_log_probs(policy)
        rewards = (self.beta * chosen, self.beta * rejected, self.beta * reward)
        numbers = ()
        for number in (*rewards, is_right, chosen_log_probs, rejected_log_probs):
            numbers = (*numbers, (number * share).sum())
        return loss, numbers

    def of_margin(self, margin):
        """Loss of each pair by how much more the policy prefers it than the reference does."""
        scaled, smoothing = self.beta * margin, self.smoothing
        if self.loss_type == "hinge":
            return self.relu(1.0 - scaled)
        if self.loss_type in ("ipo", "ipo_sum"):
            return self.squared(margin - 1.0 / (2.0 * self.beta))
        if self.loss_type == "robust":
            right, wrong = self.softplus(-scaled), self.softplus(scaled)
            return ((1.0 - smoothing) * right - smoothing * wrong) / (1.0 - 2.0 * smoothing)
        if not smoothing:
            return self.softplus(-scaled)
        return (1.0 - smoothing) * self.softplus(-scaled) + smoothing * self.softplus(scaled)


class PairwiseReward(ValueObjective):
    """-log sigmoid(reward of the first of two rows - of the second - margin); a row's reward is the value at its one token
    whose weight, the pair's share, is not 0.

    One more input: margins (B, T), at that token of the first rows.

    Args:
        center_rewards_coefficient: added: this much of (sum of both rewards)^2. Source: arXiv:2312.09244.
    """

    metrics = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    num_inputs = 1

    def __init__(self, center_rewards_coefficient: float = 0.0):
        super().__init__()
        self.center = center_rewards_coefficient
        self.keep, self.row_sum, self.keep_margin, self.margin_sum = (
            ops.Mul(),
            ops.ReduceSum(),
            ops.Mul(),
            ops.ReduceSum(),
        )
        self.row_weight, self.pair, self.pair_weights, self.pair_margins = ops.ReduceMax(), Pairs(), Pairs(), Pairs()
        self.softplus, self.share_mul, self.add_up, self.squared = (
            Softplus(),
            ops.Mul(),
            ops.ReduceSum(),
            ops.Square(),
        )

    def of(self, values, weights, margins):
        mask = self.mask(weights)
        chosen, rejected = self.pair(self.row_sum(self.keep(values, mask), 1))
        margin, _ = self.pair_margins(self.margin_sum(self.keep_margin(margins, mask), 1))
        share, _ = self.pair_weights(self.row_weight(weights, 1))
        difference = chosen - rejected
        losses = self.softplus(margin - difference)
        if self.center:
            losses = losses + self.center * self.squared(chosen + rejected)
        loss = self.add_up(self.share_mul(losses, share), 0)
        is_right = ops.cast(difference > 0, mstype.float32)
        numbers = ()
        for number in (chosen, rejected, difference, is_right):
            numbers = (*numbers, (number * share).sum())
        return loss, numbers


class Policy(TokenObjective):
    """max(-A r, -A clip(r, 1 - epsilon, 1 + epsilon_high)) of each token, r = p / old p: PPO's and GRPO's. Where both are
    equal the gradient is the first one's.

    Four more inputs (B, T): advantages A, old log-probabilities, those of the reference, and `is_first`: 1 where the old ones
    are this very model's, so that r is exactly 1; the old ones given are then not looked at. Which loss it is, grpo, bnpo,
    dr_grpo or dapo, is in the weights.

    Args:
        beta: of the KL divergence from the reference, added to the loss.
        kl: its estimate: k1, k2 or k3. Source: John Schulman, Approximating KL Divergence (2020).
        sequence_ratio: one r a row, exp(mean of log r); `sum_ratio`: exp(sum of log r), as RLOO's.
        temperature: that the texts were sampled at.
        is_cispo: CISPO: -A min(r, 1 + epsilon_high) log p, whose gradient is that of log p alone, so that no token is left
            out. Source: arXiv:2506.13585.
    """

    metrics = ("clip_fraction", "kl", "ratio_error", "sampling_difference", "entropy")
    num_inputs = 4

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        kl: str = "k3",
        sequence_ratio: bool = False,
        temperature: float = 1.0,
        sum_ratio: bool = False,
        is_cispo: bool = False,
    ):
        super().__init__()
        self.sum_ratio, self.is_cispo = sum_ratio, is_cispo
        self.low, self.high = 1.0 - epsilon, 1.0 + (epsilon if epsilon_high is None else epsilon_high)
        self.beta, self.kl, self.sequence_ratio = beta, kl, sequence_ratio
        self.cool, self.rescale = 1.0 / temperature, ops.Mul()
        self.log_ratio, self.exp, self.lower, self.upper = ops.Sub(), ops.Exp(), ops.Minimum(), ops.Maximum()
        self.share_mul, self.add_up, self.row_sum = ops.Mul(), ops.ReduceSum(), ops.ReduceSum(True)

    def log_probs(self, logits, labels):
        if self.cool != 1.0:
            logits = self.rescale(logits, self.cool)
        return super().log_probs(logits, labels)

    def of(self, log_probs, weights, advantages, old, reference, is_first):
        mask = self.mask(weights)
        difference = ops.abs(ops.stop_gradient(log_probs) - old) * is_first * mask
        old = ops.stop_gradient(log_probs) * is_first + old * (1.0 - is_first)
        log_ratio = self.log_ratio(log_probs, old) * mask
        if self.sum_ratio:
            log_ratio = self.row_sum(log_ratio, 1) * mask
        elif self.sequence_ratio:
            mean = self.row_sum(log_ratio, 1) / self.upper(self.row_sum(mask, 1), 1.0)  # (B, 1)
            log_ratio = mean * mask
        ratio = self.exp(log_ratio)
        known = ops.stop_gradient(ratio)
        if self.is_cispo:
            is_plain = ops.cast(known <= self.high, mstype.float32)
            losses = -advantages * self.lower(known, self.high) * log_probs
        else:
            plain, clipped = -advantages * ratio, -advantages * self.upper(self.lower(known, self.high), self.low)
            is_plain = ops.cast(ops.stop_gradient(plain) >= clipped, mstype.float32)
            losses = plain * is_plain + clipped * (1.0 - is_plain)
        # Masked before, too: of a token that nobody sampled the exponential may be infinite, which times 0 is NaN.
        divergence = self.divergence(log_probs * mask, reference * mask) * mask
        if self.beta:
            losses = losses + self.beta * divergence
        loss = self.add_up(self.share_mul(losses, weights), (0, 1))
        numbers = ()
        is_clipped = (1.0 - is_plain) * mask
        for number in (is_clipped, divergence, ops.abs(known - 1.0) * mask, difference, -log_probs * mask):
            numbers = (*numbers, number.sum())
        return loss, numbers

    def divergence(self, log_probs, reference):
        difference = log_probs - reference
        if self.kl == "k1":
            return difference
        if self.kl == "k2":
            return 0.5 * ops.square(difference)
        return self.exp(-difference) - 1.0 + difference


class ValueLoss(ValueObjective):
    """PPO's critic: half of max((V - R)^2, (V clipped to within cliprange_value of the old one - R)^2) of each token.

    Two more inputs (B, T): returns R, and values V as they were when the texts were sampled.
    """

    metrics = ("value_clip_fraction",)
    num_inputs = 2

    def __init__(self, cliprange_value: float = 0.2):
        super().__init__()
        self.cliprange = cliprange_value
        self.lower, self.upper, self.squared = ops.Minimum(), ops.Maximum(), ops.Square()
        self.share_mul, self.add_up = ops.Mul(), ops.ReduceSum()

    def of(self, values, weights, returns, old):
        mask = self.mask(weights)
        near = self.upper(self.lower(values, old + self.cliprange), old - self.cliprange)
        plain, clipped = self.squared(values - returns), self.squared(near - returns)
        is_plain = ops.stop_gradient(ops.cast(plain >= clipped, mstype.float32))
        losses = 0.5 * (plain * is_plain + clipped * (1.0 - is_plain))
        loss = self.add_up(self.share_mul(losses, weights), (0, 1))
        return loss, (((1.0 - is_plain) * mask).sum(),)


class ActorCritic(Objective):
    """PPO's loss of a policy, and `vf_coef` of its critic's: of logits (B*T, V) and values (B*T, 1).

    Inputs: those of `Policy`, then those of `ValueLoss`. While it does not train: log-probabilities and values, (B, 2 T).
    """

    metrics = (*Policy.metrics, *ValueLoss.metrics, "value_loss")
    num_inputs = Policy.num_inputs + ValueLoss.num_inputs

    def __init__(self, policy: Policy, value: ValueLoss, vf_coef: float):
        super().__init__()
        self.policy, self.value, self.vf_coef = policy, value, vf_coef
        self.by_row, self.beside = ops.Reshape(), ops.Concat(1)

    def construct(self, logits, values, labels, weights, *more):
        log_probs, values = self.policy.log_probs(logits, labels), self.by_row(values, labels.shape)
        if not self.training:
            return self.beside((log_probs, values))
        loss, numbers = self.policy.of(log_probs, weights, *more[:4])
        value_loss, value_numbers = self.value.of(values, weights, *more[4:])
        total = loss + self.vf_coef * value_loss
        return self.counted(total, (*numbers, *value_numbers, value_loss))
