# SPDX-License-Identifier: Apache-2.0
"""Every parameter of a decoder by name and shape, for checkpoints, converters and the planner.

The Cells of `sporeloom.nn` make the same ones; a test holds both together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from sporeloom.models.config import ModelConfig
from sporeloom.models.latent import LatentConfig
from sporeloom.models.streams import StreamsConfig

Shapes = dict[str, tuple[int, ...]]

EXPERTS = ".mlp.experts."
"""Part of the names of experts' parameters, stacked over the experts in dim 0."""


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Shape of each parameter of the model."""
    tables = {"embedding.word.weight": (config.vocab_size, config.hidden_size)}
    if config.position == "learned":
        tables["embedding.position.weight"] = (config.seq_len, config.hidden_size)
    if config.query_layer:
        tables["query_embedding.table.weight"] = (config.seq_len, config.hidden_size)
    if not config.tied_embedding:
        tables["head.weight"] = (1 if config.value_head else config.vocab_size, config.hidden_size)
    layers = {
        f"{path}.{name}": shape
        for layer, path in enumerate(config.layers)
        for name, shape in layer_shapes(config, layer).items()
    }
    mtp = {
        f"mtp.{depth}.{name}": shape for depth in range(config.num_mtp_layers) for name, shape in _mtp(config, depth)
    }
    if config.streams:
        mtp |= dict(_gates("streams_out", config, config.streams, config.streams.num_streams, 1))
    return {**tables, **layers, **mtp, **dict(_norm("final_norm", config))}


def _mtp(config: ModelConfig, depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("embedding_norm", "hidden_norm", "head_norm"):
        yield from _norm(name, config)
    yield from _linear("project", 2 * config.hidden_size, config.hidden_size, False)
    for name, shape in layer_shapes(config, config.num_layers + depth).items():
        yield f"layer.{name}", shape


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Shape of each parameter of layer number `layer`, by its name within the layer."""
    attention = _latent_attention(config, config.latent, layer) if config.latent else _attention(config)
    mlp = _experts(config) if config.has_experts(layer) else _mlp("mlp", config, config.ffn_size)
    names = {
        "sequential": ("attention_norm", "mlp_norm"),
        "parallel": ("attention_norm",),
        "sandwich": ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
    }[config.block]
    streams = _streams(config, config.streams, layer) if config.streams and layer < config.num_layers else ()
    return dict([*(entry for name in names for entry in _norm(name, config)), *attention, *mlp, *streams])


def _attention(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _linear("attention.query", config.hidden_size, config.query_size, config.qkv_bias)
    yield from _linear("attention.key", config.hidden_size, config.kv_size, config.qkv_bias)
    yield from _linear("attention.value", config.hidden_size, config.kv_size, config.qkv_bias)
    yield from _linear("attention.output", config.query_size, config.hidden_size, config.output_bias)


def _latent_attention(config: ModelConfig, latent: LatentConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, heads = config.hidden_size, config.num_heads
    if latent.query_width:
        yield from _linear("attention.query_down", d, latent.query_width, config.qkv_bias)
        yield "attention.query_norm.weight", (latent.query_width,)
        yield from _linear("attention.query_up", latent.query_width, heads * latent.head_size, False)
    else:
        yield from _linear("attention.query", d, heads * latent.head_size, False)
    yield from _linear("attention.kv_down", d, latent.kv_width + latent.rope_dim, config.qkv_bias)
    yield "attention.kv_norm.weight", (latent.kv_width,)
    yield from _linear("attention.kv_up", latent.kv_width, heads * latent.key_value_size, False)
    yield from _linear("attention.output", heads * latent.value_dim, d, config.output_bias)
    if latent.num_sinks:
        yield "attention.sink_latents", (latent.num_sinks, latent.kv_width)
        yield "attention.sink_keys", (latent.num_sinks, latent.rope_dim)
    if latent.conv_width and latent.query_width:
        widths = {"query": latent.query_width, "kv": latent.kv_width, "output": heads * latent.value_dim}
        yield from ((f"attention.{name}_conv.weight", (size, 1, latent.conv_width)) for name, size in widths.items())
    if config.indexer and config.has_indexer(layer) and latent.query_width:
        size = config.indexer.head_dim
        yield from _linear("attention.indexer.query", latent.query_width, config.indexer.num_heads * size, False)
        yield from _linear("attention.indexer.key", d, size, False)
        yield "attention.indexer.key_norm.weight", (size,)
        yield from _linear("attention.indexer.weights", d, config.indexer.num_heads, False)


def _streams(config: ModelConfig, streams: StreamsConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("attention", "mlp"):
        yield from _gates(f"{part}_streams", config, streams, streams.num_gates, 3)
    if layer in streams.norm_layers:
        yield "block_norm.weight", (streams.num_streams * config.hidden_size,)


def _gates(
    name: str, config: ModelConfig, streams: StreamsConfig, count: int, kinds: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = streams.num_streams * config.hidden_size
    yield f"{name}.norm.weight", (width,)
    yield f"{name}.gates.weight", (count, width)
    yield f"{name}.alpha", (kinds,)
    yield f"{name}.beta", (count,)


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters of the full model."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def _linear(name: str, inner: int, outer: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outer, inner)
    if bias:
        yield f"{name}.bias", (outer,)


def _mlp(name: str, config: ModelConfig, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.gated_mlp:
        yield from _linear(f"{name}.gate", config.hidden_size, width, config.mlp_bias)
    yield from _linear(f"{name}.up", config.hidden_size, width, config.mlp_bias)
    yield from _linear(f"{name}.down", width, config.hidden_size, config.mlp_bias)


def _experts(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    experts = config.mixture
    if experts.router != "hash":
        yield "mlp.router.weight", (experts.num_experts, config.hidden_size)
    if experts.has_bias:
        yield "mlp.choices.balance_bias", (experts.num_experts,)
    if experts.router_scale:
        yield "mlp.weights.scale", (1, experts.num_experts)
    for name, shape in _mlp(EXPERTS.strip("."), config, config.expert_size):
        yield name, (experts.num_experts, *((1, *shape) if len(shape) == 1 else shape))
    if experts.shared_ffn_hidden_size:
        yield from _mlp("mlp.shared", config, experts.shared_ffn_hidden_size)


def _norm(name: str, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm_bias and config.norm == "layer":
        yield f"{name}.bias", (config.hidden_size,)
