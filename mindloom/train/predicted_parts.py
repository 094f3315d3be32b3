# SPDX-License-Identifier: Apache-2.0
"""How a strategy will shard a family's model, without compiling it."""

from __future__ import annotations

from mindspore.nn.utils import no_init_parameters

from mindloom.models.config import ModelConfig
from mindloom.models.family import family_module
from mindloom.parallel.parallelize import parallelize
from mindloom.parallel.parts import Slices, parts_of
from mindloom.strategy.config import Strategy
from mindloom.train.saving import logical_name


def predicted_parts(family: str, model: ModelConfig, strategy: Strategy) -> dict[str, list[tuple[int, Slices]]]:
    """(rank, part) of every parameter, by its name in a checkpoint. Moments are sharded as their parameters are."""
    with no_init_parameters():
        net = family_module(family, "model").ModelWithLoss(model)
    report = parallelize(net, strategy)
    return {logical_name(p.name): parts_of(p, strategy.mesh) for p in report.parameters}
