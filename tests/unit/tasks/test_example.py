# SPDX-License-Identifier: Apache-2.0
"""Inputs of tasks without data are those of their objectives."""

import dataclasses
from typing import get_args

import numpy as np
import pytest

from sporeloom.certification.training import decoder_batches
from sporeloom.models.family import size_config
from sporeloom.planner.task import OF_PAIRS, TaskName, TrainedTask
from sporeloom.tasks.example import task_network

MODEL = dataclasses.replace(size_config("pangu", "tiny"), dropout_rate=0.0)
WITH_MTP = size_config("pangu", "2_tiny")
BASE = 4
"""Number of arrays of a batch: tokens, labels, positions, weights."""


@pytest.mark.parametrize("name", [name for name in get_args(TaskName) if name != "pretraining"])
def test_a_task_has_as_many_inputs_as_its_objective(name):
    task = TrainedTask(name, None, WITH_MTP)
    inputs = next(decoder_batches(WITH_MTP, 4, name))
    trains_mtp = name == "sft"
    more = 2 * WITH_MTP.num_mtp_layers if trains_mtp else task_network("pangu", MODEL, task).loss.num_inputs
    assert len(inputs) == BASE + more


def test_weights_of_preferences_are_shares_of_their_pairs_or_texts():
    for name in ("dpo", "simpo", "orpo", "kto"):
        weights = next(decoder_batches(MODEL, 4, name))[3].asnumpy().max(1)
        assert weights.sum() == pytest.approx(2 if name in OF_PAIRS else 1)  # both rows of a pair have its share


def test_the_likelihood_of_orpo_is_of_preferred_texts():
    *_, likelihood = next(decoder_batches(MODEL, 4, "orpo"))
    assert likelihood.asnumpy().sum() == pytest.approx(1)
    assert not likelihood.asnumpy()[1::2].any()


def test_texts_of_kto_are_desired_or_not_and_have_one_divergence():
    for _, _, _, weights, _, desired, divergence in (
        map(np.asarray, batch) for batch in decoder_batches(MODEL, 4, "kto")
    ):
        is_trained = weights > 0
        assert set(desired[is_trained].tolist()) <= {0.0, 1.0}
        assert len(set(divergence[is_trained].tolist())) == 1 and divergence[is_trained].min() >= 0
        assert all(len(set(row[mask].tolist())) == 1 for row, mask in zip(desired, is_trained, strict=True))
