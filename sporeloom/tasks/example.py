# SPDX-License-Identifier: Apache-2.0
"""A task without data: its network and example inputs, which dry runs compile and proofs train."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.data.batch import Batch
from sporeloom.data.sample_order import Sizes
from sporeloom.models.config import NO_LABEL, ModelConfig
from sporeloom.models.family import family_module
from sporeloom.nn.lora import attach_adapters
from sporeloom.planner.task import TrainedTask
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.train.config import Run
from sporeloom.train.policy import GRPOConfig, PPOConfig
from sporeloom.train.preferences import KTOConfig, ORPOConfig, SimPOConfig
from sporeloom.train.tuning import DPOConfig, RewardConfig, SFTConfig

OF_PREFERENCES = (RewardConfig, DPOConfig, SimPOConfig, ORPOConfig, KTOConfig)
CONFIGS = {config.task: config for config in (SFTConfig, *OF_PREFERENCES, GRPOConfig, PPOConfig)}


def task_network(family: str, model: ModelConfig, task: TrainedTask) -> nn.Cell:
    """The network that a task trains, model and loss, with its command's own settings."""
    if task.name == "pretraining":
        net: nn.Cell = family_module(family, "model").ModelWithLoss(model)
        if task.lora:
            attach_adapters(net.model, task.lora)
        return net
    settings: dict[str, Any] = {"beta": 0.1 if task.has_reference else 0.0} if task.name == "grpo" else {}
    config = CONFIGS[task.name](data=Path(), from_checkpoint=None, **settings)
    unused: dict[str, Any] = {"learning_rate": 0, "min_learning_rate": 0, "warmup_steps": 0, "decay_steps": 0}
    sizes = Sizes((1,), (model.seq_len,))
    run = Run(config, family, model, SINGLE_DEVICE, None, task.lora, sizes, loss_scale=None, **unused)
    network: nn.Cell = import_module(f"sporeloom.tasks.{task.name}").TASK(run, None).network()
    return network


def task_arrays(task: str, batch: Batch, vocab_size: int, step: int) -> list[NDArray[Any]]:
    """Inputs of a step of `task` with the texts of `batch`; further inputs are random.

    Log-probabilities are near those of a model that has learned nothing.
    """
    if task in ("pretraining", "sft"):
        return [*batch]
    draw, mask = np.random.default_rng(step), (batch.loss_weights > 0).astype(np.float32)
    rows = np.arange(len(mask))
    first, share = np.argmax(mask, axis=1), 2.0 / len(mask)  # of a pair

    def at_first(values: NDArray[Any]) -> NDArray[np.float32]:
        array = np.zeros_like(mask)
        array[rows, first] = values
        return array

    def drawn(mean: float, deviation: float) -> NDArray[np.float32]:
        return draw.normal(mean, deviation, mask.shape).astype(np.float32) * mask

    log_prob = -math.log(vocab_size)
    if task == "reward":
        margins = at_first(draw.random(len(rows)))
        margins[1::2] = 0
        return [*batch._replace(loss_weights=at_first(np.full(len(rows), share))), margins]
    if task in ("dpo", "simpo", "orpo"):
        pairs = batch._replace(loss_weights=mask * np.float32(share))
        if task == "simpo":
            return [*pairs]
        if task == "orpo":
            likelihood = (batch.labels != NO_LABEL).astype(np.float32)
            likelihood[1::2] = 0
            return [*pairs, likelihood / likelihood.sum()]
        return [*pairs, at_first(mask.sum(1) * log_prob + draw.normal(0, 1, len(rows)))]
    if task == "kto":
        reference = at_first(mask.sum(1) * log_prob + draw.normal(0, 1, len(rows)))
        desired, divergence = mask * draw.integers(0, 2, (len(rows), 1)).astype(np.float32), np.float32(draw.random())
        return [*batch._replace(loss_weights=mask / np.float32(len(rows))), reference, desired, mask * divergence]
    is_first = np.full_like(mask, step == 0)
    # Advantages of both signs, but of one mean: a loss that is nearly 0 hides what differs.
    more = [drawn(1, 1), drawn(log_prob, 0.1), drawn(log_prob, 0.1), is_first]
    more += [drawn(0, 1), drawn(0, 0.3)] if task == "ppo" else []
    return [*batch, *more]
