# SPDX-License-Identifier: Apache-2.0
"""Scale a strategy down for a few processes, with every axis, option and rule of the full one.

An axis above 1 stays above 1. Where the processes are too few for all such axes at once, every pair of them is proved (with 8
processes every three): axes interact in pairs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig, fields_of_layers
from sporeloom.models.parts.experts import ExpertConfig
from sporeloom.planner.task import TrainedTask
from sporeloom.strategy.config import V_SHAPED, OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.stages import layers_per_part, recomputed_layers

BATCH, SEQ_LEN, HEAD_DIM, VOCAB = 16, 32, 16, 128
MAX_VIRTUAL_STAGES = 2
POSSIBLE_PROCESSES = (2, 4, 8, 16)
FULL_MESH = "ranks"
"""Argument of a process of a proof that partitions ranks of the full mesh."""
IN_PROOF = "SPORELOOM_IN_PROOF"
"""Environment variable that is set in the processes of a proof."""
SUBJECT = "sporeloom.certification.subject"
"""Module that the processes of a proof load with MindSpore."""


def small_meshes(mesh: Mesh, processes: int) -> list[Mesh]:
    """List meshes of at most `processes` ranks, a power of 2, that together have every axis of `mesh`, in its order."""
    axes = [axis for axis in mesh.order if mesh.degree(axis) > 1]
    at_once = int(math.log2(processes))
    chosen = [axes] if len(axes) <= at_once else [list(some) for some in itertools.combinations(axes, at_once)]
    return [_filled(mesh, some, processes) for some in chosen]


def _filled(mesh: Mesh, axes: list[str], processes: int) -> Mesh:
    """Set every axis to 2, then double them, the innermost first, up to their degree in `mesh` and to `processes`."""
    degrees: dict[str, Any] = dict.fromkeys(axes, 2)
    for axis in reversed(axes):
        while 2 * math.prod(degrees.values()) <= processes and 2 * degrees[axis] <= mesh.degree(axis):
            degrees[axis] *= 2
    if mesh.ep > 1 and "dp" in degrees:  # all of dp, or a part of it as in `mesh` if there are enough ranks
        degrees["ep"] = degrees["dp"] if mesh.ep == mesh.dp else max(2, degrees["dp"] // 2)
    return Mesh(**degrees)


def small_strategies(strategy: Strategy, num_layers: int | None, processes: int) -> list[Strategy]:
    """List the scaled-down strategies that are proved in place of `strategy`. There is one more mesh where optimizer parallel
    shards over groups of replicas, and where several replicas hold the same experts.

    Args:
        num_layers: number of layers of the full model; None for a custom network, which keeps its layers.

    Raises:
        ConfigError: graphs of the strategy cannot be described, or the schedule is from a file.
    """
    if problems := strategy.graph_problems():
        raise ConfigError(problems)
    if strategy.pipeline.listed:
        raise ConfigError(
            f"{strategy.at('pipeline.schedule')}: a schedule from a file is for the stages and microbatches of the full "
            "mesh, which a certificate does not train; certify with a named schedule, and dry-run with this one"
        )
    meshes, zero, mesh = small_meshes(strategy.mesh, processes), strategy.optimizer_parallel, strategy.mesh
    grouped = zero and zero.shard_size and zero.shard_size < mesh.replicas
    if grouped and processes >= 4 and Mesh(dp=4) not in meshes:
        meshes.append(Mesh(dp=4))
    if 1 < mesh.ep < mesh.dp and processes >= 4 and not any(1 < small.ep < small.dp for small in meshes):
        meshes.append(Mesh(dp=4, ep=2))
    return [_small(strategy, mesh, num_layers) for mesh in meshes]


def _small(strategy: Strategy, mesh: Mesh, num_layers: int | None) -> Strategy:
    pipeline, recompute = Pipeline(), strategy.recompute
    if mesh.pp > 1:
        more = strategy.pipeline.num_microbatches > strategy.mesh.pp
        counts = [1] if num_layers is None else _layers_of_small_stages(strategy, num_layers, mesh.pp)
        uneven = None if len(set(counts)) == 1 else Stages(num_layers=counts)
        pipeline = Pipeline(
            num_microbatches=mesh.pp * (2 if more or strategy.pipeline.schedule in V_SHAPED else 1),
            stages=uneven or "uniform",
            virtual_stages=min(strategy.pipeline.virtual_stages, MAX_VIRTUAL_STAGES),
            schedule=strategy.pipeline.schedule,
        )
    if recompute:
        some = num_layers is not None and _recomputes_some(strategy, num_layers)
        recompute = Recompute(kind=recompute.kind, layers=[0] if some else "all")
    zero = strategy.optimizer_parallel if mesh.replicas > 1 else None
    if zero:
        grouped = zero.shard_size and zero.shard_size < strategy.mesh.replicas and mesh.replicas > 2
        # Between the scaled-down model's matrices, of 4 KB and more a rank, and its vectors.
        threshold = 1 if zero.threshold_kb else 0
        zero = OptimizerParallel(
            threshold_kb=threshold,
            shard_size=2 if grouped else None,
            shard_accumulated_gradients=zero.shard_accumulated_gradients,
            reshard_after_forward=zero.reshard_after_forward,
        )
    return dataclasses.replace(
        strategy,
        mesh=mesh,
        pipeline=pipeline,
        optimizer_parallel=zero,
        recompute=recompute,
        sequence_parallel=strategy.sequence_parallel and mesh.tp > 1,
        lines={},
    )


def _recomputes_some(strategy: Strategy, num_layers: int) -> bool:
    return 0 < len(recomputed_layers(num_layers, strategy)) < num_layers


def _layers_of_small_stages(strategy: Strategy, num_layers: int, num_stages: int) -> list[int]:
    """Distribute the layers of the scaled-down model. Unequal stages, or virtual stages, stay unequal: the half of them with
    more layers keeps more."""
    counts = layers_per_part(num_layers, strategy)
    num_parts = num_stages * min(strategy.pipeline.virtual_stages, MAX_VIRTUAL_STAGES)
    if len(set(counts)) == 1:
        more = 2 if _recomputes_some(strategy, num_layers) else 1
        return [more] * num_parts
    half = len(counts) // 2
    first = sum(counts[:half]) >= sum(counts[half:])
    return [2, *[1] * (num_parts - 1)] if first else [*[1] * (num_parts - 1), 2]


def rows_on_full_mesh(strategy: Strategy, rows: int) -> int:
    """Round the rows of a custom network's batch up to what dp and microbatches divide."""
    parts = strategy.mesh.dp * strategy.num_parts()
    return -(-rows // parts) * parts


def small_model(model: ModelConfig, strategy: Strategy, processes: int) -> ModelConfig:
    """Scale a model down to a few layers for all of `small_strategies`. It keeps every choice of parts, and computes in
    float32: in 16 bits equality within 1e-5 cannot be shown."""
    meshes = small_meshes(strategy.mesh, processes)
    num_stages = max(mesh.pp for mesh in meshes)
    heads = max(4, *(mesh.head_shards for mesh in meshes))
    if strategy.mesh.cp > 1 and strategy.context_parallel == "ulysses" and model.kv_heads < model.num_heads:
        heads *= 2  # half as many are of keys and values, which cp shards, too
    return dataclasses.replace(
        model,
        **fields_of_layers(model, max(2, sum(_layers_of_small_stages(strategy, model.num_layers, num_stages)))),
        hidden_size=HEAD_DIM * heads,
        num_heads=heads,
        **_small_attention(model, strategy, heads),
        ffn_hidden_size=4 * HEAD_DIM * heads,
        vocab_size=VOCAB,
        seq_len=SEQ_LEN,
        eod_id=min(model.eod_id, 9),
        loss_ignore_id=min(model.loss_ignore_id, 6),
        stop_ids=(),
        compute_dtype="float32",
        attention=model.attention_on_ascend,
        experts=model.experts and _small_experts(model.experts, heads, max(mesh.ep for mesh in meshes)),
    )


def small_task(task: TrainedTask, model: ModelConfig) -> TrainedTask:
    """Adapt a task to the scaled-down model: adapters have a rank below the width of its heads."""
    lora = task.lora and dataclasses.replace(task.lora, r=min(task.lora.r, HEAD_DIM // 2))
    return dataclasses.replace(task, lora=lora, model=model)


def _small_attention(model: ModelConfig, strategy: Strategy, heads: int) -> dict[str, Any]:
    """Fields of attention with heads of HEAD_DIM features, or with latents of a few."""
    if model.latent:
        latent = dataclasses.replace(
            model.latent,
            nope_dim=HEAD_DIM,
            rope_dim=HEAD_DIM,
            value_dim=HEAD_DIM,
            kv_width=2 * HEAD_DIM,
            query_width=model.latent.query_width and 2 * HEAD_DIM,
        )
        return {"latent": latent}
    rotated = max(2, HEAD_DIM * model.rotated // model.head_size // 2 * 2)
    return {"num_kv_heads": _small_kv_heads(model, strategy, heads), "head_dim": HEAD_DIM, "rope_dim": rotated}


def _small_experts(experts: ExpertConfig, heads: int, ep: int) -> ExpertConfig:
    """Scale experts down. A token has at most four; capacity is counted in sequences."""
    chosen = min(experts.experts_per_token, 4)
    return dataclasses.replace(
        experts,
        num_experts=2 * max(chosen, ep),
        experts_per_token=chosen,
        num_groups=2 if experts.num_groups > 1 and max(chosen, ep) > 1 else 1,
        groups_per_token=1,
        num_domains=min(experts.num_domains, 2),
        domain=min(experts.domain, 1),
        ffn_hidden_size=2 * HEAD_DIM * heads,
        shared_ffn_hidden_size=2 * HEAD_DIM * heads if experts.shared_ffn_hidden_size else 0,
        first_dense_layers=0,
        layer_frequency=1,
        capacity_group=None,
        balance_over="group",
    )


def _small_kv_heads(model: ModelConfig, strategy: Strategy, heads: int) -> int:
    """Number of heads of keys and values: equal to the number of heads if it is in the full model, fewer than tp if it is."""
    if model.kv_heads == model.num_heads:
        return heads
    return 1 if model.kv_heads < max(2, strategy.mesh.tp) else heads // 2
