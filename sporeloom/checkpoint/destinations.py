# SPDX-License-Identifier: Apache-2.0
"""Assign the shards of a checkpoint to files of ranks, for a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from sporeloom.checkpoint.contents import BESIDE_WEIGHTS, FACTORED, logical_name
from sporeloom.checkpoint.sharded import file_name
from sporeloom.core.errors import ConfigError
from sporeloom.core.log import counted
from sporeloom.models.config import ModelConfig
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.tensor_slice import TensorSlice


def destinations(
    strategy: Strategy, family: str, model: ModelConfig, shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[tuple[str, TensorSlice]]]:
    """Shards of the tensors of a model, and of its optimizer's state, in the files of the ranks of a strategy.

    For several ranks it loads MindSpore, whose operators the rules are matched with.

    Raises:
        ConfigError: the strategy cannot shard the model, or there are tensors besides the model's.
    """
    if strategy.mesh.size == 1:
        return {name: [(file_name(0), TensorSlice.full(shape))] for name, shape in shapes.items()}
    if problems := model_problems(strategy, model):
        raise ConfigError(problems)
    parts_of_model = import_module("sporeloom.parallel.model_parts").parts_of_model
    parts = {logical_name(name): held for name, held in parts_of_model(family, model, strategy).items()}
    found, others = {}, []
    for name, shape in shapes.items():
        prefix = next((moment for moment in BESIDE_WEIGHTS if name.startswith(moment)), "")
        if prefix in FACTORED:  # unsharded on every rank
            found[name] = [(file_name(0), TensorSlice.full(shape))]
        elif name.removeprefix(prefix) in parts:
            found[name] = [(file_name(rank), part) for rank, part in parts[name.removeprefix(prefix)]]
        else:
            others.append(name)
    if others:
        tensors = counted(len(others), "tensor", "tensors")
        raise ConfigError(
            f"{others[0]}: {tensors} of adapters or of a value head cannot be resharded for a strategy; "
            "resume from the checkpoint as it is, which every mesh can, or give --full"
        )
    return found
