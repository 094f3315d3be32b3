# SPDX-License-Identifier: Apache-2.0
"""Runs of models with sparse attention: when the indexer is trained, frozen, or refused."""

import dataclasses

import pytest

from sporeloom.checkpoint.model_folder import write_config
from sporeloom.core.errors import ConfigError
from sporeloom.models.family import size_config
from sporeloom.train.checks import check
from sporeloom.train.indexer import describe_indexer
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.tuning import DPOConfig, SFTConfig

FREEZE = 'parameter_groups:\n  - {match: "*.indexer.*", freeze: true}\n'


@pytest.fixture
def flags(write):
    return {"data": write("a.txt", "text"), "size": "2_tiny"}


@pytest.fixture
def folder(tmp_path):
    """Of a model with an indexer that has no loss."""
    folder = tmp_path / "base"
    folder.mkdir()
    write_config(folder, "pangu", size_config("pangu", "2_tiny"))
    return folder


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check(config, num_processes=1)
    return str(caught.value)


def test_random_initial_values_need_the_loss_or_are_frozen_on_purpose(flags, write):
    assert "give --indexer-loss-coefficient above 0, such as 0.001, or freeze it on purpose" in refused(
        TrainConfig(**flags)
    )
    run = check(TrainConfig(**flags, indexer_loss_coefficient=0.5), num_processes=1)
    assert run.model.indexer.loss_coefficient == 0.5
    assert run.groups is None
    run = check(TrainConfig(**flags, parameter_groups=write("groups.yaml", FREEZE)), num_processes=1)
    assert len(run.groups.frozen_names) == 2 * 4


def test_fine_tuning_freezes_an_indexer_without_a_loss(folder, write):
    lines = write("a.jsonl", '{"prompt": "a", "completion": "b"}\n')
    run = check(SFTConfig(data=lines, from_checkpoint=folder), num_processes=1)
    assert run.groups.frozen_names
    assert all(".attention.indexer." in name for name in run.groups.frozen_names)
    assert describe_indexer(run.config, run.model) == "indexer: frozen; --indexer-loss-coefficient trains it"
    thawed = FREEZE.replace("true", "false")
    told = refused(SFTConfig(data=lines, from_checkpoint=folder, parameter_groups=write("groups.yaml", thawed)))
    assert "attention.indexer.key.weight is not frozen, but has no loss" in told
    trained = SFTConfig(data=lines, from_checkpoint=folder, indexer_loss_coefficient=0.001)
    assert check(trained, num_processes=1).groups is None
    assert "adapters leave the indexer" in refused(dataclasses.replace(trained, lora_r=2))
    lines = write("pairs.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    told = refused(DPOConfig(data=lines, from_checkpoint=folder, indexer_loss_coefficient=0.001))
    assert "--indexer-loss-coefficient: the indexer is trained next to the cross-entropy, by `train` and `sft`" in told


def test_the_dense_warmup_trains_the_indexer_alone(flags):
    assert "--indexer-dense-warmup trains the indexer alone, by its loss; give" in refused(
        TrainConfig(**flags, indexer_dense_warmup=True)
    )
    config = TrainConfig(**flags, indexer_dense_warmup=True, indexer_loss_coefficient=1.0)
    run = check(config, num_processes=1)
    trained = set(run.groups.names) - set(run.groups.frozen_names)
    assert len(trained) == 2 * 4
    assert all(".attention.indexer." in name for name in trained)
    assert describe_indexer(config, run.model).startswith("indexer: dense warm-up; everything else is frozen")


def test_models_without_an_indexer_refuse_its_flags(flags):
    told = refused(TrainConfig(data=flags["data"], indexer_dense_warmup=True, indexer_loss_coefficient=1.0))
    assert "--indexer-loss-coefficient: this model has no indexer" in told
    assert "--indexer-dense-warmup: this model has no indexer" in told
