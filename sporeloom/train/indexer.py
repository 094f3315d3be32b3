# SPDX-License-Identifier: Apache-2.0
"""Training of the indexer of sparse attention: by its loss alone, in the dense warm-up, or not at all, so that it is frozen.

Source: DeepSeek-V3.2 technical report, section 2.1.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fnmatch import fnmatchcase

from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.indexer import PATTERN
from sporeloom.train.config import TrainingConfig
from sporeloom.train.groups import ParameterGroup, ParameterGroups

TASKS = ("pretraining", "sft")
"""Tasks with the cross-entropy of every token, to which losses of layers are added."""
GIVE_LOSS = "--indexer-loss-coefficient above 0, such as 0.001"


def with_indexer_loss(config: TrainingConfig, model: ModelConfig) -> ModelConfig:
    """The model with the coefficient of the command line.

    Raises:
        ConfigError: it has no indexer.
    """
    coefficient = config.indexer_loss_coefficient
    if not model.indexer:
        flags = {
            "--indexer-loss-coefficient": coefficient is not None,
            "--indexer-dense-warmup": config.indexer_dense_warmup,
        }
        if wrong := [name for name, is_given in flags.items() if is_given]:
            raise ConfigError([f"{name}: this model has no indexer (sparse attention); leave it out" for name in wrong])
    if model.indexer is None or coefficient is None:
        return model
    return dataclasses.replace(model, indexer=dataclasses.replace(model.indexer, loss_coefficient=coefficient))


def first_groups(config: TrainingConfig, model: ModelConfig) -> tuple[ParameterGroup, ...]:
    """Groups of parameters that are frozen before any of the user's: in the dense warm-up all but the indexers, which
    without a loss are frozen themselves, so that weight decay does not change them."""
    if not model.indexer:
        return ()
    if config.indexer_dense_warmup:
        return ParameterGroup("*", freeze=True), ParameterGroup(PATTERN, freeze=False)
    return () if has_loss(config, model) else (ParameterGroup(PATTERN, freeze=True),)


def has_loss(config: TrainingConfig, model: ModelConfig) -> bool:
    """Whether the run has the loss of the indexers."""
    return model.trains_indexer and config.task in TASKS


def describe_indexer(config: TrainingConfig, model: ModelConfig) -> str | None:
    """Describe in a line how the indexer of a model is trained; None where there is none."""
    if not model.indexer:
        return None
    if config.indexer_dense_warmup:
        return "indexer: dense warm-up; everything else is frozen, and tokens attend to all visible ones"
    if has_loss(config, model):
        return f"indexer: trained by its KL loss, times {model.indexer.loss_coefficient:g}"
    return "indexer: frozen; --indexer-loss-coefficient trains it" if config.task in TASKS else "indexer: frozen"


def indexer_problems(
    config: TrainingConfig, model: ModelConfig, groups: ParameterGroups | None, has_adapters: bool
) -> Iterator[str]:
    """List what does not go together with the indexer of a model that has one."""
    has_it, given = has_loss(config, model), config.indexer_loss_coefficient
    if config.task not in TASKS and (given or config.indexer_dense_warmup):
        flag = "--indexer-loss-coefficient" if given else "--indexer-dense-warmup"
        yield f"{flag}: the indexer is trained next to the cross-entropy, by `train` and `sft`; leave it out"
    elif has_adapters and (has_it or config.indexer_dense_warmup):
        yield (
            "adapters leave the indexer of sparse attention frozen, so its loss trains nothing; give "
            "--indexer-loss-coefficient 0, without --indexer-dense-warmup"
        )
    elif config.indexer_dense_warmup and not has_it:
        yield f"--indexer-dense-warmup trains the indexer alone, by its loss; give {GIVE_LOSS}"
    elif not has_it and not has_adapters and groups:
        yield from _frozen_problems(config, groups)


def _frozen_problems(config: TrainingConfig, groups: ParameterGroups) -> Iterator[str]:
    """List why an indexer without a loss cannot stay as it is."""
    of_indexer = {name for name in groups.names if fnmatchcase(name, PATTERN)}
    if thawed := sorted(of_indexer - {*groups.frozen_names}):
        yield f"--parameter-groups {config.parameter_groups}: {thawed[0]} is not frozen, but has no loss; give {GIVE_LOSS}"
    of_user = ParameterGroups(groups.groups[1:], groups.names)
    if config.from_checkpoint is None and not of_indexer <= {*of_user.frozen_names}:
        yield (
            "the indexer of sparse attention would stay at its random initial values, and tokens attend to random ones: "
            f'give {GIVE_LOSS}, or freeze it on purpose, with {{match: "*.indexer.*", freeze: true}} in --parameter-groups'
        )
