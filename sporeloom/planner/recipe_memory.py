# SPDX-License-Identifier: Apache-2.0
"""Activations of published runs with experts, module by module, as Megatron-Core and Transformer Engine keep them.

Sources: megatron/core at core_v0.15.0 (transformer/moe/experts.py, transformer/multi_latent_attention.py,
transformer/transformer_layer.py, fusions/fused_bias_swiglu.py). A product keeps its input, in fp8 in one byte. Experts keep
the rows that they got, both products before the activation, and its result, which has the router's weight already: what goes
back is not kept.
"""

from __future__ import annotations

import dataclasses

from sporeloom.planner.activations import KeptActivations
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.recipes import Recipe

ROPE_DIM, VALUE_DIM = 64, 128
"""Widths of a head of DeepSeek's latent attention; its queries and keys have both."""
LATENT_BYTES = 2 * 2 * (1536 + 512 + ROPE_DIM)
"""Latents of queries and of keys and values before and behind their norms; of all these models (config.json)."""


def recipe_activations(dims: Dimensions, job: Parallelism, recipe: Recipe) -> KeptActivations:
    """Bytes that a device keeps of one microbatch."""
    ours, whole = KeptActivations.of(dims, job), layer_bytes(dims, job, dataclasses.replace(recipe, repeats=()))
    if job.recompute == "full":
        return dataclasses.replace(ours, full=whole, top=dims.mtp_layers * whole)
    kept = layer_bytes(dims, job, recipe)
    return dataclasses.replace(ours, full=kept, recomputed=kept, top=dims.mtp_layers * kept)


def layer_bytes(dims: Dimensions, job: Parallelism, recipe: Recipe) -> float:
    """Bytes that a layer keeps of one microbatch, mean of layers with experts and without. Every rank of tp sends its own
    part of a sequence to experts."""
    norms = _norm_bytes(dims, job, recipe) / (job.tp if job.sequence_parallel else 1)
    experts, dense = dims.expert_share * _expert_bytes(dims, job, recipe), 0.0
    if "mlp" not in recipe.repeats:
        dense = (1 - dims.expert_share) * _mlp_bytes(dims.ffn_size, job)
    return job.tokens(dims.seq_len) * (norms + (_attention_bytes(dims, job, recipe) + experts + dense) / job.tp)


def _input_bytes(job: Parallelism) -> int:
    """Bytes of an entry of a product's input."""
    return 1 if job.precision == "fp8" else job.activation_bytes


def _mlp_bytes(width: int, job: Parallelism, repeats_activation: bool = False) -> float:
    """Bytes of a row between the matrices of a gated MLP."""
    return width * (2 * job.activation_bytes + (0 if repeats_activation else _input_bytes(job)))


def _norm_bytes(dims: Dimensions, job: Parallelism, recipe: Recipe) -> float:
    """Bytes of a token: inputs of both norms, and their results. Latents are made by two products, each with its own fp8;
    the router reads in two bytes what a shared expert, or a dense layer, reads in fp8."""
    width, h = job.activation_bytes, dims.hidden_size
    inputs = 2 * width * h
    if "layernorm" in recipe.repeats:
        return inputs
    if job.precision != "fp8":
        return inputs + 2 * width * h
    copies = (2 if dims.attention_matrices else 1) + (1 if dims.shared_ffn_size else 0)
    return inputs + (copies + width) * h


def _attention_bytes(dims: Dimensions, job: Parallelism, recipe: Recipe) -> float:
    """Bytes of a token: queries, keys, values, the kernel's result and its sums, and the result in fp8."""
    width, q, kv = job.activation_bytes, dims.query_size, dims.kv_size
    if dims.attention_matrices:
        result, heads = dims.num_heads * VALUE_DIM, dims.num_heads * (2 * (VALUE_DIM + ROPE_DIM) + VALUE_DIM)
        kept = LATENT_BYTES + width * heads * ("mla_up_proj" not in recipe.repeats)
    else:
        result, kept = q, width * (q + 2 * kv + (q + kv) * recipe.head_norms)
    return kept + result * (width + (job.precision == "fp8")) + 4 * dims.num_heads


def _expert_bytes(dims: Dimensions, job: Parallelism, recipe: Recipe) -> float:
    """Bytes of a token: its rows, the shared expert, scores of the router and their gradient in float32."""
    between = _mlp_bytes(dims.expert_ffn_size, job, "moe_act" in recipe.repeats)
    row = dims.hidden_size * _input_bytes(job) + between
    rows = dims.experts_per_token * dims.expert_rows * recipe.stash
    return rows * row + _mlp_bytes(dims.shared_ffn_size, job) + 8 * dims.num_experts
