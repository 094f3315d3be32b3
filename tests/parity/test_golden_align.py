# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients and metrics of preferences and rewarded texts are those of the reference implementations."""

import json

import mindspore as ms
import numpy as np
import pytest
from conftest import shared
from mindspore import Tensor, nn, ops

from sporeloom.align.advantages import gae, group_advantages, kl_estimate, token_rewards, token_weights, whitened
from sporeloom.nn.loss import CrossEntropy
from sporeloom.nn.objectives import PairwiseReward, Policy, Preference, ValueLoss

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
FOLDER = "golden_modern/align_case_a"
pytestmark = pytest.mark.slow


class Differentiated(nn.Cell):
    """(values, ...) -> loss, numbers, gradient of the loss to the values."""

    def __init__(self, objective):
        super().__init__()
        self.objective, self.grad = objective, ops.GradOperation()

    def loss(self, *inputs):
        return self.objective.of(*inputs)[0]

    def construct(self, *inputs):
        loss, numbers = self.objective.of(*inputs)
        return loss, numbers, self.grad(self.loss)(*inputs)


def computed(objective, *arrays):
    """Loss, {metric: number}, gradient."""
    ms.set_device("CPU")
    inputs = [Tensor(np.asarray(array, np.float32)) for array in arrays]
    loss, numbers, gradient = Differentiated(objective)(*inputs)
    told = dict(zip(objective.metrics, (float(number.asnumpy()) for number in numbers), strict=True))
    return float(loss.asnumpy()), told, gradient.asnumpy()


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(shared(f"{FOLDER}/golden.npz")))


def variants(kind):
    path = shared(f"{FOLDER}/config.json")
    return json.loads(path.read_text())[kind]


def paired(chosen, rejected):
    """Rows in pairs: (2 N, T)."""
    return np.stack([chosen, rejected], 1).reshape(-1, *chosen.shape[1:])


def test_preferences(golden):
    inside = {name: golden[f"dpo.in.{name}"] for name in ("chosen_mask", "rejected_mask")}
    mask = paired(inside["chosen_mask"], inside["rejected_mask"])
    policy, reference = (
        paired(golden[f"dpo.in.{of}_chosen"], golden[f"dpo.in.{of}_rejected"]) for of in ("policy", "reference")
    )
    pairs = len(mask) // 2
    for variant in variants("dpo"):
        kind = "ipo_sum" if variant["type"] == "ipo" and not variant["avg"] else variant["type"]
        objective = Preference(kind, variant["beta"], variant["ls"])
        loss, told, gradient = computed(objective, policy, mask / pairs, reference)
        wanted = {key: golden[f"dpo.{variant['name']}.{key}"] for key in ("loss", "accuracy", "margins")}
        np.testing.assert_allclose(loss, wanted["loss"], **CLOSE, err_msg=variant["name"])
        np.testing.assert_allclose(told["rewards/accuracies"], wanted["accuracy"], **CLOSE)
        np.testing.assert_allclose(told["rewards/margins"], wanted["margins"].mean(), **CLOSE)
        for side in ("chosen", "rejected"):
            rewards = golden[f"dpo.{variant['name']}.rewards_{side}"].mean()
            np.testing.assert_allclose(told[f"rewards/{side}"], rewards, **CLOSE, err_msg=variant["name"])
        expected = paired(*(golden[f"dpo.{variant['name']}.grad_policy_{side}"] for side in ("chosen", "rejected")))
        np.testing.assert_allclose(gradient, expected, **CLOSE, err_msg=variant["name"])


def test_a_policy_equal_to_its_reference_is_moved(golden):
    """The loss of margin 0 is log 2 and its slope -1/2: where training begins."""
    mask, policy = np.ones((2, 3)), golden["dpo.in.policy_chosen"][:2, :3]
    loss, _, gradient = computed(Preference("sigmoid", 0.1), policy, mask, policy)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-0.05] * 3, [0.05] * 3], rtol=1e-5)


def test_rewards(golden):
    chosen, rejected, margin = (golden[f"reward.{name}"] for name in ("chosen", "rejected", "margin"))
    values, share = paired(chosen, rejected)[:, None], np.full((2 * len(chosen), 1), 1 / len(chosen))
    margins = paired(margin, np.zeros_like(margin))[:, None]
    loss, told, _ = computed(PairwiseReward(), values, share, np.zeros_like(margins))
    np.testing.assert_allclose(loss, golden["reward.loss"], **CLOSE)
    np.testing.assert_allclose(told["rewards/accuracies"], golden["reward.accuracy"], **CLOSE)
    loss, _, gradient = computed(PairwiseReward(), values, share, margins)
    np.testing.assert_allclose(loss, golden["reward.loss_with_margin"], **CLOSE)
    slope = -1 / (1 + np.exp(chosen - rejected - margin)) / len(chosen)
    np.testing.assert_allclose(gradient[:, 0], paired(slope, -slope), **CLOSE)


def test_supervised_tokens(golden):
    logits, labels = golden["sft.logits"], golden["sft.labels"]
    mask = golden["sft.target_mask"]
    rows, length, vocabulary = logits.shape
    shifted, wanted = np.zeros((rows, length), np.int32), np.maximum(labels[:, 1:], 0)
    shifted[:, :-1] = wanted
    padded = np.zeros((rows, length))
    padded[:, :-1] = mask
    weights = {
        "loss_token_mean": padded / mask.sum(),
        "loss_sum_over_fixed_count": padded / golden["sft.fixed_count"],
        "loss_mean_of_row_means": padded / padded.sum(1, keepdims=True) / rows,
    }
    ms.set_device("CPU")
    loss, grad = CrossEntropy(), ops.GradOperation()
    flat, labelled = Tensor(logits.reshape(-1, vocabulary)), Tensor(shifted)
    for name, each in weights.items():
        found = loss(flat, labelled, Tensor(each.astype(np.float32)))
        np.testing.assert_allclose(found.asnumpy(), golden[f"sft.{name}"], **CLOSE, err_msg=name)
    gradient = grad(loss)(flat, labelled, Tensor(weights["loss_token_mean"].astype(np.float32)))
    np.testing.assert_allclose(gradient.asnumpy().reshape(logits.shape), golden["sft.grad_logits_token_mean"], **CLOSE)


def test_policies(golden):
    inside = {name: golden[f"ppo.in.{name}"] for name in ("logprobs", "old_logprobs", "ref_logprobs", "mask")}
    mask, zeros = inside["mask"], np.zeros_like(inside["mask"])
    for variant in variants("ppo"):
        name = f"ppo.{variant['name']}"
        objective = Policy(variant["clip"])
        advantages = golden[f"{name}.advantages_whitened"]
        given = (mask / mask.sum(), advantages, inside["old_logprobs"], inside["ref_logprobs"], zeros)
        loss, told, gradient = computed(objective, inside["logprobs"], *given)
        np.testing.assert_allclose(loss, golden[f"{name}.policy_loss"], **CLOSE, err_msg=name)
        np.testing.assert_allclose(told["clip_fraction"] / mask.sum(), golden[f"{name}.policy_clipfrac"], **CLOSE)
        np.testing.assert_allclose(gradient, golden[f"{name}.grad_logprobs"], **CLOSE, err_msg=name)
        critic = ValueLoss(variant["vclip"])
        given = (mask / mask.sum(), golden[f"{name}.returns"], golden["ppo.in.values"])
        loss, told, gradient = computed(critic, golden["ppo.in.vpreds"], *given)
        np.testing.assert_allclose(loss, golden[f"{name}.value_loss"], **CLOSE, err_msg=name)
        np.testing.assert_allclose(told["value_clip_fraction"] / mask.sum(), golden[f"{name}.value_clipfrac"], **CLOSE)
        np.testing.assert_allclose(gradient, golden[f"{name}.grad_vpreds"], **CLOSE, err_msg=name)


def test_groups(golden):
    inside = {name: golden[f"grpo.in.{name}"] for name in ("logprobs", "old_logprobs", "ref_logprobs", "mask")}
    mask = inside["mask"]
    advantages = np.broadcast_to(golden["grpo.advantages_group"][:, None], mask.shape)
    for variant in variants("grpo"):
        name, beta = f"grpo.{variant['name']}", variant["beta"]
        objective = Policy(variant["lo"], variant["hi"], beta, sequence_ratio=variant.get("level") == "sequence")
        weights = token_weights(mask, variant["type"], int(golden["grpo.in.max_completion_length"]))
        is_first = np.full_like(mask, bool(variant.get("on_policy")))
        given = (weights, advantages, inside["old_logprobs"], inside["ref_logprobs"], is_first)
        loss, told, gradient = computed(objective, inside["logprobs"], *given)
        np.testing.assert_allclose(loss, golden[f"{name}.loss"], **CLOSE, err_msg=name)
        np.testing.assert_allclose(gradient, golden[f"{name}.grad_logprobs"], **CLOSE, err_msg=name)
        if variant.get("on_policy"):
            assert told["ratio_error"] == 0
        np.testing.assert_allclose(told["clip_fraction"] / mask.sum(), golden[f"{name}.clip_fraction"], **CLOSE)


def test_advantages(golden):
    for scale in ("group", "batch", "none"):
        found = group_advantages(golden["grpo.in.rewards"], int(golden["grpo.in.group_size"]), scale)
        np.testing.assert_allclose(found, golden[f"grpo.advantages_{scale}"], rtol=1e-10, atol=1e-12)
    inside = {name: golden[f"ppo.in.{name}"] for name in ("old_logprobs", "ref_logprobs", "mask", "values", "scores")}
    mask = inside["mask"]
    for variant in variants("ppo"):
        name = f"ppo.{variant['name']}"
        divergences = {k: kl_estimate(inside["old_logprobs"], inside["ref_logprobs"], k) for k in ("k1", "k2", "k3")}
        for kind, divergence in divergences.items():
            np.testing.assert_allclose(divergence * mask, golden[f"{name}.kl_{kind}"] * mask, rtol=1e-10, atol=1e-12)
        rewards = token_rewards(inside["scores"], divergences["k1"], mask, variant["kl_coef"])
        np.testing.assert_allclose(rewards, golden[f"{name}.rewards"], rtol=1e-10, atol=1e-12)
        advantages, returns = gae(rewards, inside["values"], mask, variant["gamma"], variant["lam"])
        np.testing.assert_allclose(advantages * mask, golden[f"{name}.advantages"] * mask, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(returns * mask, golden[f"{name}.returns"] * mask, rtol=1e-10, atol=1e-12)
        found = whitened(advantages, mask)
        np.testing.assert_allclose(found * mask, golden[f"{name}.advantages_whitened"] * mask, rtol=1e-10, atol=1e-12)
