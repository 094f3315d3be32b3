# SPDX-License-Identifier: Apache-2.0
"""Every parameter of a decoder by name and shape: what checkpoints, converters and the planner go by.

The Cells of `mindloom.nn` make the same ones; a test holds both together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mindloom.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Shape of each parameter of the model."""
    tables = {"embedding.word.weight": (config.vocab_size, config.hidden_size)}
    if config.position == "learned":
        tables["embedding.position.weight"] = (config.seq_len, config.hidden_size)
    if config.query_layer:
        tables["query_embedding.table.weight"] = (config.seq_len, config.hidden_size)
    if not config.tied_embedding:
        tables["head.weight"] = (config.vocab_size, config.hidden_size)
    layer = layer_shapes(config)
    layers = {f"{path}.{name}": shape for path in config.layers for name, shape in layer.items()}
    return {**tables, **layers, **dict(_norm("final_norm", config))}


def layer_shapes(config: ModelConfig) -> Shapes:
    """Shape of each parameter of one layer, by its name within the layer."""
    attention = [
        *_linear("attention.query", config.hidden_size, config.query_size, config.qkv_bias),
        *_linear("attention.key", config.hidden_size, config.kv_size, config.qkv_bias),
        *_linear("attention.value", config.hidden_size, config.kv_size, config.qkv_bias),
        *_linear("attention.output", config.query_size, config.hidden_size, config.output_bias),
    ]
    mlp = [
        *(_linear("mlp.gate", config.hidden_size, config.ffn_size, config.mlp_bias) if config.gated_mlp else ()),
        *_linear("mlp.up", config.hidden_size, config.ffn_size, config.mlp_bias),
        *_linear("mlp.down", config.ffn_size, config.hidden_size, config.mlp_bias),
    ]
    names = {
        "sequential": ("attention_norm", "mlp_norm"),
        "parallel": ("attention_norm",),
        "sandwich": ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
    }[config.block]
    return dict([*(entry for name in names for entry in _norm(name, config)), *attention, *mlp])


def num_parameters(config: ModelConfig) -> int:
    """Of the whole model."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def _linear(name: str, inner: int, outer: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outer, inner)
    if bias:
        yield f"{name}.bias", (outer,)


def _norm(name: str, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm_bias and config.norm == "layer":
        yield f"{name}.bias", (config.hidden_size,)
