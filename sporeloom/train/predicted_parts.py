# SPDX-License-Identifier: Apache-2.0
"""Predict how a strategy shards a family's model, without compiling it."""

from __future__ import annotations

from mindspore.nn.utils import no_init_parameters

from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.parts import parts_of
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.tensor_slice import TensorSlice
from sporeloom.train.saving import logical_name


def predicted_parts(family: str, model: ModelConfig, strategy: Strategy) -> dict[str, list[tuple[int, TensorSlice]]]:
    """List (rank, shard) of every parameter, by its name in a checkpoint. Moments are sharded as their parameters
    are."""
    with no_init_parameters():
        net = family_module(family, "model").ModelWithLoss(model)
    report = parallelize(net, strategy)
    return {logical_name(p.name): parts_of(p, strategy.mesh) for p in report.parameters}
