# SPDX-License-Identifier: Apache-2.0
"""Seconds of one layer, and of the head, for one microbatch on one device. Derivations and sources:
docs/explanation/planner.md."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parameters import head_columns
from sporeloom.planner.rates import KERNEL_HEAD, Rates, all_reduce, all_to_all, axes_bandwidth, groups_along

SCORE_PASSES = 6.5  # products write and read scores; scale, mask, softmax and dropout pass over them
TP_OVERLAP = (
    0.5  # of tensor parallel collectives is hidden: torchtitan's runs with AsyncTP and without differ by 0.3 to 0.5
)
FP8_GATHERS = 0.75  # of the bytes: an all-gather in fp8, a reduce-scatter in two bytes
QUANTIZE_PASSES = (
    2  # of a product's input: read in 2 bytes, written in 1 as it is and transposed; so the gradient of its output
)
NORM_PASSES = 4  # a kernel reads and writes
OWN_RMS_PASSES = {"fp32": 6, "fp16": 9, "bf16": 9, "fp8": 9}  # operators square, scale and weigh, in float32
OWN_SCORE_PASSES, OWN_DROPOUT_PASSES = 8.5, 2.5  # softmax in float32 writes probabilities in both types


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one microbatch in one layer (or the head) on one device."""

    matmul: float
    attention: float
    memory: float
    overhead: float
    tensor_parallel: float
    expert_parallel: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def plus(self, other: LayerTime) -> LayerTime:
        return LayerTime(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def score_passes(dims: Dimensions, job: Parallelism) -> float:
    """Number of passes over the scores of a layer's forward pass, outside of a fused kernel."""
    if job.own_graphs and job.precision != "fp32" and dims.float32_softmax:
        return OWN_SCORE_PASSES + OWN_DROPOUT_PASSES * dims.dropout
    return SCORE_PASSES


def norm_passes(dims: Dimensions, job: Parallelism) -> int:
    """Number of passes over the input of a norm in a forward pass."""
    return OWN_RMS_PASSES[job.precision] if job.own_graphs and dims.operator_norm else NORM_PASSES


def layer_forward(dims: Dimensions, job: Parallelism, rates: Rates) -> LayerTime:
    """Time of the forward pass of one layer for one microbatch."""
    tokens, tp, h, q = job.microbatch * dims.seq_len / job.cp, job.tp, dims.hidden_size, dims.query_size
    kv_parts = math.gcd(tp, dims.kv_heads)
    keys = dims.kv_size / kv_parts
    if job.own_graphs:  # three products, each of which reads its input
        matmul = rates.matmul(tokens, q / tp, h) + 2 * rates.matmul(tokens, keys, h)
    else:
        matmul = rates.matmul(tokens, q / tp + 2 * keys, h)
    matmul += rates.matmul(tokens, h, q / tp)
    if dims.attention_matrices and dims.products is None:  # latent attention of published runs has smaller ones
        matmul *= dims.attention_matrices / (2 * h * (q + dims.kv_size))
    ffn = dims.always_used_ffn
    matmul += (dims.mlp_matrices - 1) * rates.matmul(tokens, ffn / tp, h) + rates.matmul(tokens, h, ffn / tp)
    attention = 4 * tokens * dims.seq_len * q / tp / rates.attention_flops
    if job.flash_attention:
        attention *= 0.5 * max(1.0, KERNEL_HEAD / dims.head_size)
    # Passes: two norms read and write, two residual additions read twice and write once, each with half a dropout mask.
    passes = (3 + norm_passes(dims, job) * dims.num_norms) * tokens * h / (tp if job.sequence_parallel else 1)
    passes += (2 * dims.mlp_matrices - 2) * tokens * ffn / tp  # the activation
    if not job.flash_attention:
        passes += score_passes(dims, job) * tokens * dims.num_heads * dims.seq_len / tp
    if job.precision == "fp8":
        passes += QUANTIZE_PASSES * tokens * (2 * h / (tp if job.sequence_parallel else 1) + (q + ffn) / tp)
    reduced = num_reductions(dims, job) * all_reduce(rates.width * tokens * h, tp, rates.tp)
    if job.gathers_fp8 and job.sequence_parallel:
        reduced *= FP8_GATHERS
    if job.overlaps_tensor_parallel:
        reduced *= 1 - TP_OVERLAP
    if job.cp > 1:
        reduced += 2 * rates.width * tokens * dims.kv_size / tp * (job.cp - 1) / rates.cp  # keys and values go round
    part = LayerTime(matmul, attention, rates.width * passes / rates.bytes, rates.overhead, reduced)
    if not dims.num_experts:
        return part
    whole = part.plus(experts_forward(dims, job, rates))
    return dataclasses.replace(whole, expert_parallel=exposed_rows(whole, job, rates))


def num_reductions(dims: Dimensions, job: Parallelism) -> int:
    """All-reduces of a layer over tp in a forward pass: where something is computed with a result of a parallel block, such
    as dropout, our graphs add up each on its own."""
    return 1 if dims.block == "parallel" and (dims.sums_both_results or not job.own_graphs) else 2


def exposed_rows(layer: LayerTime, job: Parallelism, rates: Rates) -> float:
    """Seconds of a layer's all-to-alls that are not hidden, mean of both passes: behind those of another microbatch where the
    engine computes them meanwhile. A backward pass takes twice as long as a forward one."""
    hidden = (
        rates.experts.overlap * 1.5 * (layer.matmul + layer.attention + layer.memory) if job.overlaps_experts else 0.0
    )
    return max(0.0, layer.expert_parallel - hidden)


def experts_forward(dims: Dimensions, job: Parallelism, rates: Rates) -> LayerTime:
    """Time of the forward pass of one layer's router and experts for one microbatch, mean of layers with and
    without.

    A device has its share of the experts for the tokens of all that share them out, so as many rows as its own tokens make;
    products of experts are less efficient than one product of all rows, and each reads its own weights. Rows go to their
    experts and back (`_exchange`).
    """
    fitted, share = rates.experts, dims.expert_share
    tokens, h, parts = job.microbatch * dims.seq_len / job.cp, dims.hidden_size, job.parts_of_expert
    rows = tokens * dims.experts_per_token * job.expert_rows(dims) * dims.expert_imbalance * parts / job.tp
    local = dims.num_experts / job.ep
    each, width = rows / local, dims.expert_ffn_size / parts
    products = (dims.mlp_matrices - 1) * rates.matmul(each, width, h) + rates.matmul(each, h, width)
    matmul = rates.matmul(tokens, dims.num_experts, h) + local * products / fitted.products
    passed = tokens * job.sorted_rows(dims) if job.computes_own_rows(dims) else rows
    passes = fitted.passes * passed * h + (2 * dims.mlp_matrices - 2) * passed * width
    sent, reduced = _exchange(dims, job, rates, tokens, rows)
    return LayerTime(
        matmul=share * matmul,
        attention=0.0,
        memory=share * rates.width * passes / rates.bytes,
        overhead=share * rates.expert_overhead,
        tensor_parallel=share * reduced,
        expert_parallel=share * sent,
    )


def _exchange(dims: Dimensions, job: Parallelism, rates: Rates, tokens: float, rows: float) -> tuple[float, float]:
    """Seconds in which rows go to their experts and back, and in which what tensor parallel ranks have is added up.

    Without a capacity limit an all-gather of the tokens and a reduce-scatter of their results, added up once a token (once a
    row, if experts have biases); else two all-to-alls of rows.
    """
    h, parts, width = dims.hidden_size, job.parts_of_expert, rates.width
    if job.computes_own_rows(dims):
        ranks, added_up = job.gathers_tokens_of, tokens
        experts = job.mesh.expert_axes[1] if job.ep <= job.dp else "dp"
        ring = axes_bandwidth(rates.cluster, job, (experts,), ranks, job.cp * job.tp)
        sent = all_reduce(width * ranks * tokens * h, ranks, ring)  # both together
        if dims.mlp_bias:
            added_up = tokens * job.sorted_rows(dims)
            if parts < job.tp:  # biases, sharded by features in their table and by experts as rows: forward alone
                moved = (dims.mlp_matrices - 1) * width * added_up * dims.expert_ffn_size
                over_tp = job.mesh.parted("tp", job.tp // parts)[0]
                groups = groups_along(rates.cluster, job, over_tp, job.tp // parts, parts)
                once = all_to_all(rates.cluster, moved / parts, groups)
                sent += (once + all_reduce(moved, parts, rates.tp) / 2) / 2  # mean of both passes
        return sent, all_reduce(width * added_up * h, job.tp, rates.tp)
    times = dims.experts_per_token if job.sends_once else 0
    num_bytes = width * rows * h / (parts if job.sends_once else 1)  # and tensor parallel ranks gather what each got
    stride = job.cp * (job.tp if parts == job.tp else 1)  # ep is a part of dp, the outer axis
    groups = groups_along(rates.cluster, job, ("ep",), job.ep, stride)
    once = all_to_all(rates.cluster, num_bytes, groups, times)
    added_up = tokens if job.sends_once else rows  # a token's experts first, or what the ranks have of each row
    reduced = all_reduce(width * added_up * h, parts, rates.tp) if parts > 1 else 0.0
    return 2 * once, reduced


def attention_core(dims: Dimensions, job: Parallelism, rates: Rates) -> float:
    """Seconds of selective recomputation."""
    tokens = job.microbatch * dims.seq_len / job.cp
    if not job.flash_attention and (work := dims.products and dims.products.layer):
        moved = work.keys(dims.seq_len) * work.selective_keys.forward.num_bytes(rates.width) / job.tp
        return tokens * moved / rates.bytes
    if job.flash_attention:  # its kernel computes scores again anyway; two norms and the activation
        spread = job.tp if job.sequence_parallel else 1
        features = 4 * dims.hidden_size / spread + 3 * dims.ffn_size / job.tp
        if job.repeated_features is not None:
            features = job.repeated_features / job.tp
        products = 2 * tokens * job.repeated_entries / job.tp / rates.flops
        return products + rates.width * tokens * features / rates.bytes
    flops = 4 * tokens * dims.seq_len * dims.query_size / job.tp / rates.attention_flops
    return flops + rates.width * score_passes(dims, job) * tokens * dims.num_heads * dims.seq_len / job.tp / rates.bytes


def unneeded_result(dims: Dimensions, job: Parallelism, rates: Rates) -> float:
    """Seconds of a layer's last product and of adding it up over tp, which a graph leaves out where the layer is
    recomputed: no gradient needs the result. The norm behind it in a sandwich block does."""
    if job.repeats_results or dims.num_experts or dims.block == "sandwich":
        return 0.0
    tokens, h = job.microbatch * dims.seq_len / job.cp, dims.hidden_size
    unneeded = unneeded_entries(dims, job)
    product = rates.matmul(tokens, h, unneeded / h / job.tp) if unneeded else 0.0
    whole = all_reduce(rates.width * tokens * h, job.tp, rates.tp)
    if dims.block == "parallel":  # of attention and the MLP
        whole *= num_reductions(dims, job)
    return product + (whole / 2 if job.sequence_parallel else whole)


def head_forward(dims: Dimensions, job: Parallelism, rates: Rates) -> LayerTime:
    """Time of the forward pass of the head and the loss for one microbatch."""
    tokens, columns = job.microbatch * dims.seq_len / job.cp, head_columns(dims, job)
    passes = 3 * 4 * tokens * columns
    matmul = rates.matmul(tokens, columns, dims.hidden_size)
    matmul += 2 * tokens * columns * dims.hidden_size * (1 / rates.head_flops - 1 / rates.flops)
    return LayerTime(matmul, 0.0, passes / rates.bytes, rates.overhead, 0.0)


def unneeded_entries(dims: Dimensions, job: Parallelism) -> int:
    """Entries of a layer's last product, which a graph that recomputes the layer leaves out."""
    if not job.own_graphs or dims.num_experts or dims.block == "sandwich":
        return 0
    return dims.hidden_size * (dims.always_used_ffn + (dims.query_size if dims.block == "parallel" else 0))
