# SPDX-License-Identifier: Apache-2.0
"""Bytes on each pipeline stage's devices, term by term. Derivations and sources: docs/explanation/planner.md."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from dataclasses import dataclass

from sporeloom.models.parts import attention, mlp, multi_token_prediction, norm
from sporeloom.models.parts.experts import router_work
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism, PartLayers
from sporeloom.strategy.schedule import held_parts

OWN_LOGIT_BYTES = 20
"""Bytes of a logit at the peak of the loss in this package's graphs: five tensors in float32 (shifted logits, exponentials,
labels, their product, a gradient), as timelines have it (`dry-run --memory`)."""
Stages = tuple[Dimensions, int, tuple[int, ...], tuple[int, ...], int]
"""Key of everything that the parameters of stages depend on: model, tp, each stage's layers and layers of experts,
the last stage."""


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


def layer_parameters(dims: Dimensions, tp: int) -> int:
    """Parameters of one layer on one device."""
    return layer_copies(dims, tp).total()


def layer_copies(dims: Dimensions, tp: int) -> Counter[int]:
    """Parameters of one layer on one device, by how many tensor parallel ranks hold the same ones.

    Keys and values have a part for each of their heads at most.
    """
    kv_parts = math.gcd(tp, dims.kv_heads)
    found = Counter({1: (dims.layer_matrices + dims.layer_biases_cut - dims.layer_kv) // tp})
    found[tp // kv_parts] += dims.layer_kv // kv_parts
    found[tp] += dims.layer_vectors_whole
    return found


def stage_copies(dims: Dimensions, job: Parallelism) -> tuple[Counter[int], ...]:
    """Parameters of each stage on one of its devices, by how many tensor parallel ranks of it hold the same ones.

    The first stage has the tables of words and positions, the last one the last norm, the queries' table and the
    head's, which is a second copy of the words where they are tied and there is more than one stage. Not to be changed:
    who asks again gets the same ones.
    """
    return _stage_copies(_stages_of(dims, job))


def _stages_of(dims: Dimensions, job: Parallelism) -> Stages:
    return dims, job.tp, job.stages(dims.num_layers), job.expert_layers(dims), job.last_stage


@functools.lru_cache(maxsize=1024)  # a search needs the same for many jobs
def _stage_copies(stages: Stages) -> tuple[Counter[int], ...]:
    dims, tp, layers_of, expert_layers_of, last_stage = stages
    words, table = dims.vocab_size * dims.hidden_size // tp, dims.position_table
    dense, sparse = (layer_copies(kind, tp) for kind in dims.kinds)
    counts = tuple(
        Counter({copies: (layers - few) * dense[copies] + few * sparse[copies] for copies in {*dense, *sparse}})
        for layers, few in zip(layers_of, expert_layers_of, strict=True)
    )
    ends = [dims.further_entries * end // dims.num_layers for end in itertools.accumulate(layers_of, initial=0)]
    for stage, (start, end) in zip(counts, itertools.pairwise(ends), strict=True):
        stage[tp] += end - start
    first, last = counts[0], counts[last_stage]
    first[1] += words
    first[tp] += min(dims.position_tables, 1) * table
    for copies, entries in (sparse if dims.num_experts else dense).items():
        last[copies] += dims.mtp_layers * entries
    last[tp] += dims.mtp_layers * dims.mtp_vectors_and_projection
    last[tp] += dims.norm + max(dims.position_tables - 1, 0) * table
    if dims.value_head:
        last[tp] += dims.hidden_size
    elif not dims.tied_embedding or last_stage > 0:
        last[1] += words
    return counts


def stage_parameters(dims: Dimensions, job: Parallelism) -> tuple[int, ...]:
    """Parameters of each stage on one of its devices, before the optimizer's sharding."""
    return _stage_parameters(_stages_of(dims, job))


@functools.lru_cache(maxsize=1024)
def _stage_parameters(stages: Stages) -> tuple[int, ...]:
    return tuple(counts.total() for counts in _stage_copies(stages))


def head_columns(dims: Dimensions, job: Parallelism) -> float:
    """Number of values that a device computes for each token's output."""
    return 1 if dims.value_head else dims.vocab_size / job.tp


@functools.lru_cache(maxsize=1024)
def expert_parameters(dims: Dimensions, job: Parallelism) -> tuple[int, ...]:
    """Parameters of each stage's experts on one of its devices, before the optimizer's sharding; they are separate
    from the others."""
    whole = dims.mlp_bias * dims.hidden_size  # the bias of the sum over the parts
    part = (dims.expert_parameters - whole) // job.parts_of_expert + whole
    layers = list(job.expert_layers(dims))
    layers[job.last_stage] += dims.mtp_layers if dims.num_experts else 0
    return tuple(count * dims.num_experts * part // job.ep for count in layers)


def expert_shards(job: Parallelism) -> int:
    """Number of ranks over which the optimizer shards its state of experts: those that hold the same ones."""
    same = job.replicas * job.tp // (job.ep * job.parts_of_expert)
    return max(1, min(job.shards, same)) if job.zero else 1


def expert_activations(dims: Dimensions, job: Parallelism) -> float:
    """Bytes that one layer keeps of one microbatch for its experts: rows that were sent there, between their
    matrices, back."""
    if not dims.num_experts:
        return 0.0
    tokens, width = job.tokens(dims.seq_len), job.activation_bytes
    rows = dims.expert_share * tokens * dims.experts_per_token * job.expert_rows(dims)
    spread = job.tp if job.parts_of_expert < job.tp else 1  # tp ranks that send a part each
    if job.computes_own_rows(dims):
        rows, spread = dims.expert_share * tokens * job.sorted_rows(dims), 1
    by_parts = dims.products is not None and dims.products.layer is not None
    between = (
        mlp.work(dims, dims.expert_ffn_size).kept.narrow if by_parts else mlp.kept_features(dims, dims.expert_ffn_size)
    )
    routed = dims.expert_share * tokens * router_work(dims.hidden_size).kept.num_bytes(width) if by_parts else 0.0
    return rows / spread * width * (2 * dims.hidden_size + between / job.parts_of_expert) + routed


def copied_parameters(dims: Dimensions, job: Parallelism) -> list[int]:
    """The part of `stage_parameters` that several tensor parallel ranks of the stage hold."""
    return [counts.total() - counts[1] for counts in stage_copies(dims, job)]


def layer_activations(dims: Dimensions, job: Parallelism, recompute: str | None = None, of_mtp: bool = False) -> float:
    """Bytes that one layer keeps of one microbatch. `of_mtp`: one of multi-token prediction.

    Source: arXiv:2205.05198 table 2, s b h (10 + 24/t + 5 a s / (h t)), taken apart for other widths: whole on each tensor
    parallel rank are the inputs of the norms and of the products after them (8 h) and two dropout masks (2 h); cut are
    queries, keys and values, the context (2 bytes each), the MLP between its matrices, and per head and key the
    scores' softmax, its dropout and mask (5).
    """
    recompute = recompute or job.recompute
    tokens, width = job.tokens(dims.seq_len), job.activation_bytes
    h, spread = dims.hidden_size, job.tp if job.sequence_parallel else 1
    if recompute == "full":
        return tokens * width * dims.stream_width / spread
    if work := dims.products and dims.products.work(job.flash_attention, of_mtp):
        kept = work.num_bytes(dims.seq_len, spread, job.tp, "kept", width, recompute == "selective")
        if not job.ulysses:  # keys and values of all ranks of cp
            kept += (job.cp - 1) * width * work.key_features / job.tp
        kept += mlp.work(dims, dims.always_used_ffn).kept.num_bytes(width) / job.tp
        return tokens * (kept) + expert_activations(dims, job)
    masks = 2 * (width if dims.float32_softmax else 1) * h if dims.dropout else 0
    whole = dims.num_norms * width * norm.kept_features(dims) + masks
    cut = width * (attention.kept_features(dims) + mlp.kept_features(dims, dims.always_used_ffn))
    if dims.float32_softmax:  # probabilities in float32 and, where it is another type, in that of the product; masks
        kept = 4 + (width if width < 4 else 0) + (4 if dims.dropout else 0)
    else:
        kept = width + (1 + width if dims.dropout else 0)
    scores = kept * dims.num_heads * dims.seq_len
    if job.flash_attention:
        scores = 0
        if recompute == "selective":  # values that are cheap to recompute: outputs of the norms and of the activation
            whole, cut = whole - dims.num_norms * width * h, cut - width * dims.always_used_ffn
    elif recompute == "selective":
        scores = 0
    return tokens * (whole / spread + (cut + scores) / job.tp) + expert_activations(dims, job)


def top_activations(dims: Dimensions, job: Parallelism) -> float:
    """Bytes that the last stage keeps of one microbatch behind its layers: residual streams as they become one, and
    multi-token prediction."""
    if dims.products is None:
        return 0.0
    tokens, width, spread = job.tokens(dims.seq_len), job.activation_bytes, job.tp if job.sequence_parallel else 1
    out, own = dims.products.streams_out.kept, multi_token_prediction.work(dims.hidden_size).kept
    reads = tokens * own.num_bytes(width) / spread
    depth = layer_activations(dims.mtp, job, "none", of_mtp=True)
    if job.pp == 1:  # labels of all depths are there, one-hot, before the first loss is computed
        depth = max(depth, tokens * head_columns(dims, job) * 4)
    return tokens * out.num_bytes(width) / spread + dims.mtp_layers * (reads + depth)


@dataclass(frozen=True)
class KeptActivations:
    """Bytes that a device keeps of one microbatch from its forward to its backward pass."""

    full: float
    """Bytes of a layer."""
    recomputed: float
    """Bytes of a layer that is recomputed."""
    mask: float
    """Bytes of the attention mask, once a stage."""
    embedding: float
    """Bytes of the embedding's dropout, on the first stage."""
    logits: float
    """Bytes on the last stage; in a pipeline, whose forward passes end with the losses, of every depth."""
    top: float = 0.0
    """Bytes on the last stage behind its layers, without the head."""

    @classmethod
    def of(cls, dims: Dimensions, job: Parallelism) -> KeptActivations:
        tokens, width = job.tokens(dims.seq_len), job.activation_bytes
        dropout = dims.dropout * (width if dims.float32_softmax else 1)  # as published: a byte
        return cls(
            full=layer_activations(dims, job, "none"),
            recomputed=layer_activations(dims, job),
            mask=job.mask_bytes * tokens * dims.seq_len,
            embedding=tokens * dropout * dims.hidden_size / job.tp,
            logits=tokens * head_columns(dims, job) * 4 * (1 + (dims.mtp_layers if job.pp > 1 else 0)),
            top=top_activations(dims, job),
        )


def held_activations(job: Parallelism, kept: KeptActivations, stage: int, parts: tuple[PartLayers, ...]) -> float:
    """Peak bytes of activations on a stage's device.

    The mask and the embedding go with a microbatch's first part on the stage, the logits with the last. Logits of one
    microbatch are temporary, not held.
    """
    sizes = _of_parts(job, kept, stage, parts)
    moments = _moments(job, stage)
    totals = [sum(map(operator.mul, moment, sizes)) for moment in moments]
    if stage == job.last_stage:
        totals = [total + max(0, moment[-1] - 1) * kept.logits for total, moment in zip(totals, moments, strict=True)]
    return max(totals)


def _of_parts(job: Parallelism, kept: KeptActivations, stage: int, parts: tuple[PartLayers, ...]) -> list[float]:
    """Bytes that a device of a stage keeps of one microbatch, for each of its parts."""
    sizes = [
        part.recomputed * (kept.recomputed - kept.full) + (part.layers - part.offloaded) * kept.full for part in parts
    ]
    sizes[0] += kept.mask + (kept.embedding if stage == 0 else 0.0)
    sizes[-1] += kept.top if stage == job.last_stage else 0.0
    return sizes


def _moments(job: Parallelism, stage: int) -> tuple[tuple[int, ...], ...]:
    return held_parts(stage, job.pp, job.num_microbatches, job.virtual_stages, job.schedule)


def _offloaded(job: Parallelism, kept: KeptActivations, stage: int, parts: tuple[PartLayers, ...]) -> float:
    """Maximum bytes of activations in the host's memory."""
    counts = (sum(n * part.offloaded for n, part in zip(moment, parts, strict=True)) for moment in _moments(job, stage))
    return max(counts) * kept.full


def stage_memory(dims: Dimensions, job: Parallelism, trains_all: bool = True) -> list[StageMemory]:
    """Memory of each stage's devices. `trains_all`: all weights have gradients."""
    tokens, width = job.tokens(dims.seq_len), job.activation_bytes
    spread = job.tp if job.sequence_parallel else 1
    kept, parts_of, result = KeptActivations.of(dims, job), job.parts(dims.num_layers), []
    again, away = job.recomputed(dims.num_layers), job.offloaded_layers or (0,) * job.pp
    of_experts, shards, on_host = expert_parameters(dims, job), expert_shards(job), moments_on_host(dims, job)
    for stage, count in enumerate(stage_parameters(dims, job)):
        experts = of_experts[stage]
        parts = parts_of[stage]
        activations = held_activations(job, kept, stage, parts)
        working = max(kept.full - kept.recomputed if again[stage] else 0.0, kept.full if away[stage] else 0.0)
        working += _for_scores(dims, job)
        if stage == job.last_stage:  # input of the last norm and the head; logits in float32, and their gradient
            activations += tokens * _kept_by_last_norm(dims, width) / spread
            working = max(working, (OWN_LOGIT_BYTES if job.own_graphs else job.logit_bytes) / 4 * kept.logits)
        weights = job.weight_bytes * cut_parameters(count, experts, job.shards, shards, job.zero >= 3)
        if job.zero == 3 and job.shards > 1:
            weights += _gathered_weights(dims, job, stage)
            if job.gradient_copies > 1 and width < 4:  # shards are cast once for all microbatches
                weights += width * cut_parameters(count, experts, job.shards, shards, True)
            working += width * layer_parameters(dims, job.tp)  # one's gradient
        of_words = _whole_words(dims, job) if stage == 0 and trains_all else 0.0
        if job.own_graphs:
            of_microbatch = sum(_of_parts(job, kept, stage, parts))
            if trains_all:
                working = max(working, _after_backward(dims, job, stage) - min(activations, of_microbatch))
            if (
                job.pp > 1
            ):  # a backward pass holds its inputs until it runs again, on the last stage also those of the loss
                working += of_microbatch + (stage == job.last_stage) * 2 * kept.logits
            weights += _gathered_words(dims, job) if stage == 0 else 0.0
        moments = job.optimizer_bytes * cut_parameters(count, experts, job.shards, shards, True)
        moments -= second_moments_saved(dims, job)[stage]
        result.append(
            StageMemory(
                parameters=count + experts,
                weights=weights,
                gradients=job.gradient_copies
                * job.gradient_bytes
                * (cut_parameters(count, experts, job.shards, shards, job.zero >= 2) + of_words),
                optimizer=moments - on_host[stage],
                activations=activations,
                working=working,
                host_activations=_offloaded(job, kept, stage, parts) if away[stage] else 0.0,
            )
        )
    return result


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


def cut_parameters(count: int, experts: int, shards: int, expert_shards: int, is_cut: bool) -> float:
    return count / shards + experts / expert_shards if is_cut else count + experts


def peak_memory(dims: Dimensions, job: Parallelism) -> float:
    """Bytes on the fullest device."""
    return max(stage.total for stage in stage_memory(dims, job))
