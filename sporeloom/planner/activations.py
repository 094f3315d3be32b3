# SPDX-License-Identifier: Apache-2.0
"""Bytes that a device keeps of a microbatch from its forward to its backward pass. Derivations and sources:
docs/explanation/planner.md."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from sporeloom.models.parts import attention, mlp, multi_token_prediction, norm
from sporeloom.models.parts.experts import router_work
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism, PartLayers
from sporeloom.planner.parameters import head_columns
from sporeloom.strategy.schedule import held_parts


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
    sizes = activations_of_parts(job, kept, stage, parts)
    moments = _moments(job, stage)
    totals = [sum(map(operator.mul, moment, sizes)) for moment in moments]
    if stage == job.last_stage:
        totals = [total + max(0, moment[-1] - 1) * kept.logits for total, moment in zip(totals, moments, strict=True)]
    return max(totals)


def activations_of_parts(
    job: Parallelism, kept: KeptActivations, stage: int, parts: tuple[PartLayers, ...]
) -> list[float]:
    """Bytes that a device of a stage keeps of one microbatch, for each of its parts."""
    sizes = [
        part.recomputed * (kept.recomputed - kept.full) + (part.layers - part.offloaded) * kept.full for part in parts
    ]
    sizes[0] += kept.mask + (kept.embedding if stage == 0 else 0.0)
    sizes[-1] += kept.top if stage == job.last_stage else 0.0
    return sizes


def _moments(job: Parallelism, stage: int) -> tuple[tuple[int, ...], ...]:
    return held_parts(stage, job.pp, job.num_microbatches, job.virtual_stages, job.schedule)


def offloaded_activations(job: Parallelism, kept: KeptActivations, stage: int, parts: tuple[PartLayers, ...]) -> float:
    """Maximum bytes of activations in the host's memory."""
    counts = (sum(n * part.offloaded for n, part in zip(moment, parts, strict=True)) for moment in _moments(job, stage))
    return max(counts) * kept.full
