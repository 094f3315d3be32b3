# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients and metrics of distillation, KTO, ORPO, SimPO and RLOO are those of the reference implementations."""

import json
import re

import mindspore as ms
import numpy as np
import pytest
from conftest import shared
from mindspore import Tensor
from test_golden_align import CLOSE, computed, paired

from sporeloom.align.advantages import leave_one_out_advantages, rewards_with_kl, token_weights
from sporeloom.nn.distillation import Distillation, Divergence
from sporeloom.nn.objectives import Policy
from sporeloom.nn.preferences import KTO, ORPO, SimPO

FOLDER = "golden_v3/distill/case_a"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def case():
    folder = shared(FOLDER)
    return json.loads((folder / "config.json").read_text()), dict(np.load(folder / "golden.npz"))


def test_divergences_from_a_teacher(case):
    config, golden = case
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    mask = golden["distill.mask"].astype(np.float32)
    student, teacher = (
        Tensor(golden[f"distill.{name}_logits"].astype(np.float32).reshape(mask.size, -1))
        for name in ("student", "teacher")
    )
    labels, weights = Tensor(np.zeros(mask.shape, np.int32)), Tensor(mask / mask.sum())
    for name in config["distill"]["variants"]:
        beta, temperature, top_k, kind = re.fullmatch(
            r"distill\.beta_([\d.]+)\.temperature_([\d.]+)(?:\.top_(\d+))?\.(\w+)", name
        ).groups()
        objective = Distillation(Divergence(float(beta), float(temperature), int(top_k or 0), kind == "tail"))
        loss, gradient = ms.value_and_grad(objective.set_train())(student, teacher, labels, weights)
        found = objective.set_train(False)(student, teacher, labels, weights)
        for key, value in (("per_token", found), ("loss", loss), ("gradient", gradient)):
            expected = golden[f"{name}.{key}"]
            np.testing.assert_allclose(
                value.asnumpy().reshape(expected.shape), expected, **CLOSE, err_msg=f"{name}.{key}"
            )


def test_texts_that_are_desired_or_not(case):
    config, golden = case
    mask, kl_mask, label = (golden[f"kto.{name}"] for name in ("mask", "kl_mask", "label"))
    mismatched = ((golden["kto.kl_policy_logprobs"] - golden["kto.kl_reference_logprobs"]) * kl_mask).sum(1)
    kl = max(0.0, float(mismatched.mean()))
    for variant in config["kto"]:
        name, weights = f"kto.{variant['name']}", (variant["desirable_weight"], variant["undesirable_weight"])
        objective = KTO(variant["beta"], *weights, variant["loss_type"])
        if variant["loss_type"] == "kto":
            np.testing.assert_allclose(kl, golden[f"{name}.kl"], **CLOSE)
        inputs = (mask / len(mask), golden["kto.reference_logprobs"], label[:, None] * mask, kl * mask)
        loss, told, gradient = computed(objective, golden["kto.policy_logprobs"], *inputs)
        np.testing.assert_allclose(loss, golden[f"{name}.loss"], **CLOSE, err_msg=name)
        np.testing.assert_allclose(gradient, golden[f"{name}.gradient"], **CLOSE, err_msg=name)
        rewards = golden[f"{name}.rewards"].sum() / len(mask)
        np.testing.assert_allclose(told["rewards/desired"] + told["rewards/undesired"], rewards, **CLOSE)


def test_odds_ratios(case):
    config, golden = case
    chosen, rejected, likely = (
        golden[f"pairs.{name}_logprobs"] for name in ("chosen", "rejected", "chosen_prompt_and_answer")
    )
    zeros, pairs = np.zeros_like(chosen), len(chosen)
    mask = paired(golden["pairs.chosen_mask"], golden["pairs.rejected_mask"])
    likelihood = paired(np.full_like(likely, 1 / likely.size), zeros)
    policy = np.concatenate([paired(chosen, rejected), paired(likely, zeros)], 1)
    weights, likelihood = (np.concatenate(parts, 1) for parts in ((mask / pairs, 0 * mask), (0 * mask, likelihood)))
    for variant in config["orpo"]:
        name = f"orpo.{variant['name']}"
        loss, told, gradient = computed(ORPO(variant["beta"]), policy, weights, likelihood)
        for key, value in (("loss", loss), ("nll", told["nll"])):
            np.testing.assert_allclose(value, golden[f"{name}.{key}"], **CLOSE, err_msg=name)
        np.testing.assert_allclose(told["log_odds"], golden[f"{name}.log_odds"].mean(), **CLOSE)
        of_answers, of_texts = np.split(gradient, 2, 1)
        expected = paired(*(golden[f"{name}.gradient_{side}"] for side in ("chosen", "rejected")))
        np.testing.assert_allclose(of_answers, expected, **CLOSE, err_msg=name)
        np.testing.assert_allclose(of_texts[::2], golden[f"{name}.gradient_nll"], **CLOSE, err_msg=name)


def test_pairs_without_a_reference(case):
    config, golden = case
    policy = paired(golden["pairs.chosen_logprobs"], golden["pairs.rejected_logprobs"])
    mask = paired(golden["pairs.chosen_mask"], golden["pairs.rejected_mask"])
    for variant in config["simpo"]:
        name, has_means = f"simpo.{variant['name']}", variant["gamma"] is not None
        objective = SimPO(variant["beta"], variant["gamma"] or 0.0, variant["label_smoothing"], has_means)
        loss, told, gradient = computed(objective, policy, 2 * mask / len(mask))
        np.testing.assert_allclose(loss, golden[f"{name}.loss"], **CLOSE, err_msg=name)
        expected = paired(*(golden[f"{name}.gradient_{side}"] for side in ("chosen", "rejected")))
        np.testing.assert_allclose(gradient, expected, **CLOSE, err_msg=name)
        assert told["rewards/margins"] == pytest.approx(told["rewards/chosen"] - told["rewards/rejected"], abs=1e-5)


def test_texts_compared_with_the_others_of_their_group(case):
    config, golden = case
    names = ("logprobs", "old_logprobs", "reference_logprobs", "mask", "rewards")
    policy, old, reference, mask, rewards = (golden[f"rloo.{name}"] for name in names)
    group, weights = config["rloo"]["group"], token_weights(mask, "grpo", mask.shape[1])
    for variant in config["rloo"]["variants"]:
        name, is_first = f"rloo.{variant['name']}", bool(variant.get("same"))
        found = rewards_with_kl(rewards, old, reference, mask, variant["beta"])
        advantages = leave_one_out_advantages(found, group, "batch" if variant["normalize_advantages"] else "none")
        if not is_first:
            np.testing.assert_allclose(found, golden[f"{name}.rewards_with_kl"], rtol=1e-10)
            np.testing.assert_allclose(advantages, golden[f"{name}.advantages"], rtol=1e-10)
        else:
            advantages = golden[f"{name}.advantages"]
        inputs = (weights, advantages[:, None] * mask, old, reference, np.full_like(mask, is_first))
        loss, told, gradient = computed(Policy(variant["epsilon"], sum_ratio=True), policy, *inputs)
        np.testing.assert_allclose(loss, golden[f"{name}.loss"], **CLOSE, err_msg=name)
        np.testing.assert_allclose(gradient, golden[f"{name}.gradient"], **CLOSE, err_msg=name)
        clipped = (golden[f"{name}.clipped"][:, None] * mask).sum()
        assert told["clip_fraction"] == pytest.approx(0 if is_first else clipped), name
