# SPDX-License-Identifier: Apache-2.0
"""Assign the shards of a checkpoint to files of ranks, for a strategy; MindSpore is loaded in another process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any

from sporeloom.checkpoint.contents import BESIDE_WEIGHTS, FACTORED
from sporeloom.checkpoint.sharded import file_name
from sporeloom.core.errors import ConfigError
from sporeloom.core.processes import end_with_parent
from sporeloom.models.config import ModelConfig
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.tensor_slice import TensorSlice


def shards_for(
    strategy: Strategy, family: str, model: ModelConfig, shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[tuple[str, TensorSlice]]]:
    """Shards of the tensors of a model, and of its optimizer's state, on the ranks of a strategy.

    Raises:
        ConfigError: the strategy cannot shard the model.
    """
    if strategy.mesh.size == 1:
        return {name: [(file_name(0), TensorSlice.full(shape))] for name, shape in shapes.items()}
    if problems := model_problems(strategy, model):
        raise ConfigError(problems)
    # MindSpore takes 400 MB: a process of its own gives them back.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent, (os.getpid(),)) as pool:
        parts = pool.submit(_predicted_parts, family, model, strategy).result()
    found = {}
    for name, shape in shapes.items():
        prefix = next((moment for moment in BESIDE_WEIGHTS if name.startswith(moment)), "")
        if prefix in FACTORED:  # unsharded on every rank
            found[name] = [(file_name(0), TensorSlice.full(shape))]
        else:
            found[name] = [(file_name(rank), part) for rank, part in parts[name.removeprefix(prefix)]]
    return found


def _predicted_parts(family: str, model: ModelConfig, strategy: Strategy) -> Any:
    prepare_environment()
    return import_module("sporeloom.train.predicted_parts").predicted_parts(family, model, strategy)
