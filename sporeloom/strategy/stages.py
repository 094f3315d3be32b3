# SPDX-License-Identifier: Apache-2.0
"""Assignment of layers to pipeline stages, and the layers that are recomputed."""

from __future__ import annotations

import dataclasses

from sporeloom.strategy.config import Recompute, Stages, Strategy


def layers_per_part(num_layers: int, strategy: Strategy) -> list[int]:
    """Number of layers of each virtual stage, in the order of the layers. Layers left over by an even distribution
    go to the first ones: the last has the head."""
    num_parts, stages = strategy.num_virtual_stages, strategy.pipeline.stages
    if isinstance(stages, Stages) and stages.num_layers is not None:
        return list(stages.num_layers)
    weights = stages.weights if isinstance(stages, Stages) and stages.weights else [1.0] * num_parts
    counts = [1] * num_parts
    for _ in range(num_layers - num_parts):  # each further layer goes to the part furthest below its share
        shares = [count / weight for count, weight in zip(counts, weights, strict=True)]
        counts[shares.index(min(shares))] += 1
    return counts


def in_proportion(strategy: Strategy) -> Strategy:
    """The strategy for a model of another depth: the numbers of layers that it lists for stages become proportions."""
    stages = strategy.pipeline.stages
    if not isinstance(stages, Stages) or stages.num_layers is None:
        return strategy
    weights = Stages(weights=[float(count) for count in stages.num_layers])
    return dataclasses.replace(strategy, pipeline=dataclasses.replace(strategy.pipeline, stages=weights))


def part_of_layers(num_layers: int, strategy: Strategy) -> list[int]:
    """Virtual stage of each layer."""
    return [part for part, count in enumerate(layers_per_part(num_layers, strategy)) for _ in range(count)]


def stage_of_layers(num_layers: int, strategy: Strategy) -> list[int]:
    """Stage of each layer."""
    return [strategy.stage_of_part(part) for part in part_of_layers(num_layers, strategy)]


def layers_of_stages(num_layers: int, strategy: Strategy) -> list[list[int]]:
    """Layers of each stage."""
    stages = stage_of_layers(num_layers, strategy)
    return [[layer for layer, of in enumerate(stages) if of == stage] for stage in range(strategy.mesh.pp)]


def layers_per_stage(num_layers: int, strategy: Strategy) -> list[int]:
    """Number of layers of each stage."""
    return [len(layers) for layers in layers_of_stages(num_layers, strategy)]


def offloaded_layers(num_layers: int, strategy: Strategy) -> list[int]:
    """Layers whose activations are kept in the host's memory."""
    layers = strategy.offload.layers if strategy.offload else []
    return list(range(num_layers)) if layers == "all" else sorted(layers)


def recomputed_layers(num_layers: int, strategy: Strategy) -> list[int]:
    """Layers whose activations are recomputed."""
    recompute: Recompute | None = strategy.recompute
    if recompute is None:
        return []
    if recompute.per_stage is not None:
        stages = zip(layers_of_stages(num_layers, strategy), recompute.per_stage, strict=True)
        return sorted(layer for layers, wanted in stages for layer in layers[:wanted])
    return list(range(num_layers)) if recompute.layers == "all" else sorted(recompute.layers)
