# SPDX-License-Identifier: Apache-2.0
"""Which layer belongs to which pipeline stage, and which are computed twice."""

from __future__ import annotations

from mindloom.strategy.config import Recompute, Stages, Strategy


def layers_per_stage(num_layers: int, strategy: Strategy) -> list[int]:
    """Number of layers of each stage. Layers left over by an even deal go to the first stages: the last has the head."""
    num_stages, stages = strategy.mesh.pp, strategy.pipeline.stages
    if isinstance(stages, Stages) and stages.num_layers is not None:
        return list(stages.num_layers)
    weights = stages.weights if isinstance(stages, Stages) and stages.weights else [1.0] * num_stages
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):  # each further layer goes to the stage furthest below its share
        shares = [count / weight for count, weight in zip(counts, weights, strict=True)]
        counts[shares.index(min(shares))] += 1
    return counts


def stage_of_layers(num_layers: int, strategy: Strategy) -> list[int]:
    """Stage of each layer."""
    return [stage for stage, count in enumerate(layers_per_stage(num_layers, strategy)) for _ in range(count)]


def recomputed_layers(num_layers: int, strategy: Strategy) -> list[int]:
    """Layers whose activations are computed again."""
    recompute: Recompute | None = strategy.recompute
    if recompute is None:
        return []
    if recompute.per_stage is not None:
        chosen: list[int] = []
        first = 0
        for count, wanted in zip(layers_per_stage(num_layers, strategy), recompute.per_stage, strict=True):
            chosen += range(first, first + min(count, wanted))
            first += count
        return chosen
    return list(range(num_layers)) if recompute.layers == "all" else sorted(recompute.layers)
