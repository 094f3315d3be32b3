# SPDX-License-Identifier: Apache-2.0
"""Seconds of a layer with latent attention, of multi-token prediction and of the head behind them, for one microbatch on one
device, from the work that their parts declare (`sporeloom.planner.layer_work`)."""

from __future__ import annotations

import dataclasses
import math

from sporeloom.models.parts import mlp, multi_token_prediction
from sporeloom.models.parts.work import Values, Work
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.layer_time import (
    LayerTime,
    experts_forward,
    exposed_rows,
    head_forward,
    layer_forward,
    num_reductions,
)
from sporeloom.planner.layer_work import LayerWork, Matrix
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parameters import head_columns
from sporeloom.planner.rates import KERNEL_HEAD, Rates, all_reduce, float32_speed

BACKWARD_PASSES = 1.5  # passes over memory of a layer's backward, relative to its forward, where no part declares them
FUSED_BACKWARD = 2.5  # FLOPs of an attention kernel's backward pass, relative to its forward: it computes scores again
BESIDE_PASSES = 9  # over a layer's input, behind the same collectives: the gradients of its readers are added up
LOSS = Values(2, 4)
"""Passes over logits, half of them forward."""
SHARDED_LOSS = Values(2, 8)
"""The same where they are sharded: collectives lie between the operators."""


def layer_passes(
    dims: Dimensions, job: Parallelism, rates: Rates, products: int = 3, of_mtp: bool = False
) -> tuple[LayerTime, LayerTime]:
    """Time of the forward and of the backward pass of one layer.

    Args:
        products: number of products of each matrix in both passes together: 2 where its weights are frozen.
        of_mtp: of a layer of multi-token prediction.
    """
    more = dims.products
    work = more and more.work(job.flash_attention, of_mtp)
    if work:
        return _by_parts(dims, job, rates, products, work)
    forward = layer_forward(dims, job, rates)
    attention = FUSED_BACKWARD if job.flash_attention else 2.0
    return forward, LayerTime(
        (products - 1) * forward.matmul,
        attention * forward.attention,
        BACKWARD_PASSES * forward.memory,
        2 * forward.overhead,
        exposed_backward(dims, job, rates, forward),
        forward.expert_parallel,
    )


def exposed_backward(dims: Dimensions, job: Parallelism, rates: Rates, forward: LayerTime) -> float:
    """Seconds of a layer's collectives over tp in its backward pass that are not hidden: those of a parallel block of our
    graphs run next to products of attention's input, unless its kernel is fused."""
    if not job.own_graphs or dims.block != "parallel" or job.sequence_parallel or job.flash_attention:
        return forward.tensor_parallel
    tokens, h = job.tokens(dims.seq_len), dims.hidden_size
    kv_parts = math.gcd(job.tp, dims.kv_heads)
    beside = 2 * (rates.matmul(tokens, dims.query_size / job.tp, h) + rates.matmul(tokens, dims.kv_size / kv_parts, h))
    return max(0.0, forward.tensor_parallel - beside - BESIDE_PASSES * rates.width * tokens * h / rates.bytes)


def _by_parts(
    dims: Dimensions, job: Parallelism, rates: Rates, products: int, work: LayerWork
) -> tuple[LayerTime, LayerTime]:
    tokens, tp, ffn = job.tokens(dims.seq_len), job.tp, dims.always_used_ffn
    spread = tp if job.sequence_parallel else 1
    matmul = sum(_product(tokens, matrix, tp, rates) for matrix in work.matrices)
    if ffn:
        matmul += (dims.mlp_matrices - 1) * rates.matmul(tokens, ffn / tp, dims.hidden_size)
        matmul += rates.matmul(tokens, dims.hidden_size, ffn / tp)
    # The indexer's inputs get no gradient; its weights do where it is trained.
    share = work.indexer_share
    chosen = share * sum(_product(tokens / spread, matrix, 1, rates) for matrix in work.indexer_matrices)
    float32_rate = rates.cluster.peak_tflops * 1e12 * rates.cluster.fitted.matmul * float32_speed(rates.cluster)
    in_float32 = tokens / spread * (work.float32_flops / float32_rate + work.float32_bytes / rates.bytes)
    rate = rates.attention_flops
    scores = 2 * tokens * work.keys(dims.seq_len) * work.score_features / tp / rate
    fused = 2 * tokens * work.keys(dims.seq_len) * work.kernel_features / tp / rate
    fused *= 0.5 * max(1.0, KERNEL_HEAD / dims.head_size)
    index_scores = 2 * tokens / spread * dims.seq_len * share * work.indexer_features / rate
    reduced, reduced_backward = _reductions(dims, job, rates, work)
    forward = LayerTime(
        matmul + chosen + in_float32,
        scores + fused + index_scores,
        _seconds(dims, job, rates, work, "forward"),
        rates.overhead,
        reduced,
    )
    trained = work.indexer_is_trained
    backward = LayerTime(
        (products - 1) * matmul + trained * chosen + 2 * in_float32,
        2 * (scores + trained * index_scores) + FUSED_BACKWARD * fused,
        _seconds(dims, job, rates, work, "backward"),
        2 * rates.overhead,
        reduced_backward,
    )
    if not dims.num_experts:
        return forward, backward
    experts = experts_forward(dims, job, rates)
    sent = exposed_rows(forward.plus(experts), job, rates)
    again = LayerTime(
        (products - 1) * experts.matmul,
        0.0,
        BACKWARD_PASSES * experts.memory,
        2 * experts.overhead,
        experts.tensor_parallel,
        sent,
    )
    return forward.plus(dataclasses.replace(experts, expert_parallel=sent)), backward.plus(again)


def _product(tokens: float, matrix: Matrix, tp: int, rates: Rates) -> float:
    inner, outer = (
        size / tp if matrix.cut == side else size for side, size in (("inner", matrix.inner), ("outer", matrix.outer))
    )
    return rates.matmul(tokens, outer, inner)


def _seconds(dims: Dimensions, job: Parallelism, rates: Rates, work: LayerWork, phase: str) -> float:
    """Seconds of the passes over memory of a phase."""
    spread, tp = job.tp if job.sequence_parallel else 1, job.tp
    moved = work.num_bytes(dims.seq_len, spread, tp, phase, rates.width)
    of_mlp: Work = mlp.work(dims, dims.always_used_ffn)
    moved += getattr(of_mlp, phase).num_bytes(rates.width) / tp
    return job.tokens(dims.seq_len) * moved / rates.bytes


def _reductions(dims: Dimensions, job: Parallelism, rates: Rates, work: LayerWork) -> tuple[float, float]:
    """Seconds of a layer's collectives over tp, and over cp: backward the gradients of latents are added up in place of that
    of the layer's input."""
    tokens, tp = job.tokens(dims.seq_len), job.tp

    def of(width: float) -> float:
        return all_reduce(rates.width * tokens * width, tp, rates.tp)

    h, shared = dims.hidden_size, 0.0
    forward = num_reductions(dims, job) * of(h)
    backward = of(h) + of(work.latent_width) + (of(h) / 2 if job.sequence_parallel else 0.0)
    if job.cp > 1:
        width = work.gathered_width / tp + work.gathered_key
        shared = rates.width * tokens * width * (job.cp - 1) / rates.cp  # keys and values go round
    return forward + shared, backward + shared


def head_passes(dims: Dimensions, job: Parallelism, rates: Rates, products: int = 3) -> tuple[LayerTime, LayerTime]:
    """Time of what the last stage does behind its layers: multi-token prediction, the head and the loss."""
    head = head_forward(dims, job, rates)
    forward, backward = head, _mirrored(head, products)
    more = dims.products
    tokens, spread = job.tokens(dims.seq_len), job.tp if job.sequence_parallel else 1
    if job.own_graphs:
        of_loss = (SHARDED_LOSS if job.tp > 1 else LOSS).num_bytes(rates.width)
        passes = tokens * head_columns(dims, job) * of_loss / 2 / rates.bytes
        forward, backward = (dataclasses.replace(of, memory=passes) for of in (forward, backward))
    if dims.mtp_layers:
        depth = _depth(dims, job, rates, products, forward, backward)
        forward, backward = (
            of.plus(times(one, dims.mtp_layers)) for of, one in zip((forward, backward), depth, strict=True)
        )
    if more is None:
        return forward, backward
    out, width = more.streams_out, rates.width
    moved_back = tokens / spread * out.backward.num_bytes(width)
    if products > 2 and dims.mtp_layers:
        of_embedding, of_head = multi_token_prediction.bytes_of_tables(dims.mtp_layers)
        moved_back += dims.vocab_size * dims.hidden_size * (of_embedding / spread + of_head / job.tp)
    forward = _and_passes(forward, tokens / spread * out.forward.num_bytes(width) / rates.bytes)
    return forward, _and_passes(backward, moved_back / rates.bytes)


def _depth(
    dims: Dimensions, job: Parallelism, rates: Rates, products: int, *head: LayerTime
) -> tuple[LayerTime, LayerTime]:
    """Time of a depth of multi-token prediction: projection, layer and head."""
    tokens, spread, h = job.tokens(dims.seq_len), job.tp if job.sequence_parallel else 1, dims.hidden_size
    projected = LayerTime(rates.matmul(tokens, h, 2 * h), 0.0, 0.0, 0.0, 0.0)
    own = multi_token_prediction.work(h)
    moved = (
        tokens / spread * own.forward.num_bytes(rates.width),
        tokens / spread * own.backward.num_bytes(rates.width),
    )
    layer = layer_passes(dims.mtp, job, rates, products, of_mtp=True)
    both = zip(layer, head, (projected, _mirrored(projected, products)), moved, strict=True)
    forward, backward = (
        _and_passes(one.plus(of_head).plus(more), num / rates.bytes) for one, of_head, more, num in both
    )
    return forward, backward


def _mirrored(forward: LayerTime, products: int) -> LayerTime:
    """Time of the backward pass of products and passes over memory."""
    return LayerTime((products - 1) * forward.matmul, 0.0, BACKWARD_PASSES * forward.memory, 2 * forward.overhead, 0.0)


def _and_passes(of: LayerTime, seconds: float) -> LayerTime:
    return dataclasses.replace(of, memory=of.memory + seconds)


def times(of: LayerTime, count: int) -> LayerTime:
    """The time of so many."""
    return LayerTime(*(count * each for each in vars(of).values()))
