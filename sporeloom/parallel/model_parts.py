# SPDX-License-Identifier: Apache-2.0
"""Shards of a family's model under a strategy, found without compiling it."""

from __future__ import annotations

from mindspore.nn.utils import no_init_parameters

from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.parts import parts_of
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.tensor_slice import TensorSlice


def parts_of_model(family: str, model: ModelConfig, strategy: Strategy) -> dict[str, list[tuple[int, TensorSlice]]]:
    """List (rank, shard) of every parameter of the training network."""
    with no_init_parameters():
        net = family_module(family, "model").ModelWithLoss(model)
    return {each.name: parts_of(each, strategy.mesh) for each in parallelize(net, strategy).parameters}
