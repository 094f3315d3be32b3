# SPDX-License-Identifier: Apache-2.0
"""Bytes on each pipeline stage's devices, term by term. Derivations and sources: docs/explanation/planner.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sporeloom.models.parts import norm
from sporeloom.planner.activations import KeptActivations, activations_of_parts, held_activations, offloaded_activations
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parameters import (
    cut_parameters,
    expert_parameters,
    expert_shards,
    layer_parameters,
    stage_parameters,
)

OWN_LOGIT_BYTES = 20
"""Bytes of a logit at the peak of the loss in this package's graphs: five tensors in float32 (shifted logits, exponentials,
labels, their product, a gradient), as timelines have it (`dry-run --memory`)."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a stage, at its peak."""

    parameters: int
    """Number of parameters that the device computes with, before the optimizer's sharding."""
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Activations kept from forward to backward, for all microbatches in flight."""
    working: float
    """Temporary memory of one layer or the head."""
    host_activations: float = 0.0
    """Activations of offloaded layers, which `total` leaves out."""
    beside: float = 0.0
    """Auxiliary models and KV caches, see `sporeloom.planner.task`."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working + self.beside


def stage_memory(dims: Dimensions, job: Parallelism, trains_all: bool = True) -> list[StageMemory]:
    """Memory of each stage's devices. `trains_all`: all weights have gradients."""
    kept, parts_of = KeptActivations.of(dims, job), job.parts(dims.num_layers)
    of_experts, shards, away = expert_parameters(dims, job), expert_shards(job), job.offloaded_layers or (0,) * job.pp
    saved, on_host, result = second_moments_saved(dims, job), moments_on_host(dims, job), []
    for stage, count in enumerate(stage_parameters(dims, job)):
        experts, parts = of_experts[stage], parts_of[stage]
        activations = held_activations(job, kept, stage, parts)
        if stage == job.last_stage:
            spread = job.tp if job.sequence_parallel else 1
            activations += job.tokens(dims.seq_len) * _kept_by_last_norm(dims, job.activation_bytes) / spread
        gradients = cut_parameters(count, experts, job.shards, shards, job.zero >= 2)
        gradients += _whole_words(dims, job) if stage == 0 and trains_all else 0.0
        moments = job.optimizer_bytes * cut_parameters(count, experts, job.shards, shards, True)
        result.append(
            StageMemory(
                parameters=count + experts,
                weights=_weights(dims, job, stage),
                gradients=job.gradient_copies * job.gradient_bytes * gradients,
                optimizer=moments - saved[stage] - on_host[stage],
                activations=activations,
                working=_working(dims, job, stage, kept, activations, trains_all),
                host_activations=offloaded_activations(job, kept, stage, parts) if away[stage] else 0.0,
            )
        )
    return result


def _weights(dims: Dimensions, job: Parallelism, stage: int) -> float:
    """Bytes of weights, sharded ones and those that are gathered from them."""
    count, experts = stage_parameters(dims, job)[stage], expert_parameters(dims, job)[stage]
    shards, width = expert_shards(job), job.activation_bytes
    weights = job.weight_bytes * cut_parameters(count, experts, job.shards, shards, job.zero >= 3)
    if job.zero == 3 and job.shards > 1:
        weights += _gathered_weights(dims, job, stage)
        if job.gradient_copies > 1 and width < 4:  # shards are cast once for all microbatches
            weights += width * cut_parameters(count, experts, job.shards, shards, True)
    return weights + (_gathered_words(dims, job) if stage == 0 else 0.0)


def _working(
    dims: Dimensions, job: Parallelism, stage: int, kept: KeptActivations, activations: float, trains_all: bool
) -> float:
    """Bytes that a stage's device needs for a moment, besides `activations` that it keeps."""
    again, away = job.recomputed(dims.num_layers)[stage], (job.offloaded_layers or (0,) * job.pp)[stage]
    working = max(kept.full - kept.recomputed if again else 0.0, kept.full if away else 0.0)
    working += _for_scores(dims, job)
    if stage == job.last_stage:  # logits in float32, and their gradient
        working = max(working, (OWN_LOGIT_BYTES if job.own_graphs else job.logit_bytes) / 4 * kept.logits)
    if job.zero == 3 and job.shards > 1:
        working += job.activation_bytes * layer_parameters(dims, job.tp)  # one's gradient
    if not job.own_graphs:
        return working
    of_microbatch = sum(activations_of_parts(job, kept, stage, job.parts(dims.num_layers)[stage]))
    if trains_all:
        working = max(working, _after_backward(dims, job, stage) - min(activations, of_microbatch))
    if job.pp > 1:  # a backward pass holds its inputs until it runs again, on the last stage also those of the loss
        working += of_microbatch + (stage == job.last_stage) * 2 * kept.logits
    return working


def _after_backward(dims: Dimensions, job: Parallelism, stage: int) -> float:
    """Bytes of gradients besides `StageMemory.gradients` as a backward pass of our graphs ends: those of several microbatches
    as they are added to the sum; and of a table that is sharded later or tied, whose gradients are added to those of the
    head."""
    experts, shards = expert_parameters(dims, job)[stage], expert_shards(job)
    count, is_cut = stage_parameters(dims, job)[stage], job.zero >= 2
    added_up = cut_parameters(count, experts, job.shards, shards, is_cut)
    added_up += _whole_words(dims, job) if stage == 0 else 0.0
    added_up *= job.gradient_copies - 1
    tables = 2 * (dims.tied_embedding and job.last_stage == 0 and not dims.value_head) + is_cut
    return job.gradient_bytes * (added_up + (stage == 0) * tables * dims.vocab_size * dims.hidden_size / job.tp)


def _whole_words(dims: Dimensions, job: Parallelism) -> float:
    """Entries of the embedding table's gradient that belong to other tensor parallel ranks: without sequence parallelism
    each of them adds up all rows in our graphs. Where the table is also the head it is sharded like that; with ZeRO-2 or 3 it
    is reduce-scattered."""
    is_head = dims.tied_embedding and not dims.value_head
    if not job.own_graphs or job.sequence_parallel or job.zero >= 2 or is_head:
        return 0.0
    return dims.vocab_size * dims.hidden_size * (1 - 1 / job.tp)


def _for_scores(dims: Dimensions, job: Parallelism) -> float:
    """Bytes that our graphs need for the scores of a layer, for a moment, besides what is kept of them: as dropout's mask is
    computed three tensors of 4 bytes and the probabilities, of which 10 bytes are kept; else logits and probabilities."""
    if not job.own_graphs or job.flash_attention:
        return 0.0
    return (6 if dims.dropout else 2) * job.tokens(dims.seq_len) * dims.num_heads * dims.seq_len / job.tp


def _gathered_words(dims: Dimensions, job: Parallelism) -> float:
    """Bytes of the gathered embedding table, in float32, in which our graphs look up, besides the copy for products. ZeRO-3
    counts it with weights outside layers; a table that stages share, or that shards do not divide, is not sharded."""
    is_sent = dims.tied_embedding and job.last_stage > 0
    if not job.own_graphs or job.zero not in (1, 2) or job.shards == 1 or job.activation_bytes == 4 or is_sent:
        return 0.0
    return 0.0 if dims.vocab_size // job.tp % job.shards else 4 * dims.vocab_size * dims.hidden_size / job.tp


def _kept_by_last_norm(dims: Dimensions, width: int) -> float:
    """Bytes of a token that the last norm and the head keep."""
    if dims.products and dims.products.layer:
        return norm.work(dims.hidden_size, True).kept.num_bytes(width)
    return 2 * width * dims.hidden_size


def _gathered_weights(dims: Dimensions, job: Parallelism, stage: int) -> float:
    """Bytes of gathered weights that a device of a stage holds at once with ZeRO-3: two layers, and weights
    outside layers, whose tables the model families look up in float32."""
    dense, sparse = (layer_parameters(kind, job.tp) for kind in dims.kinds)
    few = job.expert_layers(dims)[stage]
    of_layers = (job.stages(dims.num_layers)[stage] - few) * dense + few * sparse
    others = (stage_parameters(dims, job)[stage] - of_layers) * (4 if dims.float32_softmax else job.activation_bytes)
    return 2 * job.activation_bytes * max(dense, sparse) + others


def second_moments_saved(dims: Dimensions, job: Parallelism) -> list[float]:
    """Bytes of second moments on a device of each stage that AdamW has and Muon has not; biases of experts are neglected."""
    if not job.muon:
        return [0.0] * job.pp
    kv_parts, few = math.gcd(job.tp, dims.kv_heads), job.expert_layers(dims)
    dense, sparse = (
        (kind.layer_matrices - kind.layer_kv) // job.tp + kind.layer_kv // kv_parts + kind.layer_router
        for kind in dims.kinds
    )
    counts = [
        (n - with_experts) * dense + with_experts * sparse
        for n, with_experts in zip(job.stages(dims.num_layers), few, strict=True)
    ]
    experts, shards = expert_parameters(dims, job), expert_shards(job)
    return [
        job.moment_bytes / 2 * cut_parameters(count, of_stage, job.shards, shards, True)
        for count, of_stage in zip(counts, experts, strict=True)
    ]


def moments_on_host(dims: Dimensions, job: Parallelism) -> list[float]:
    """Bytes of the optimizer's moments in the host's memory, for each stage's device."""
    if not job.optimizer_on_host:
        return [0.0] * job.pp
    of_experts, shards = expert_parameters(dims, job), expert_shards(job)
    counts = enumerate(stage_parameters(dims, job))
    return [
        job.moment_bytes * cut_parameters(count, of_experts[stage], job.shards, shards, True) for stage, count in counts
    ]


def peak_memory(dims: Dimensions, job: Parallelism) -> float:
    """Bytes on the fullest device."""
    return max(stage.total for stage in stage_memory(dims, job))
