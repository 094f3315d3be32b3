# SPDX-License-Identifier: Apache-2.0
"""Every parameter of a decoder by name, shape and initial value: what its parts declare. The Cells of `sporeloom.nn` are
built from it; checkpoints, converters and the planner read it.
"""

from __future__ import annotations

import math

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts import (
    attention,
    experts,
    indexer,
    latent_attention,
    mlp,
    multi_token_prediction,
    norm,
    streams,
    tables,
)
from sporeloom.models.parts.spec import InitRule, ParameterSpec, ParameterSpecs, Specs

Shapes = dict[str, tuple[int, ...]]


def parameter_specs(config: ModelConfig) -> Specs:
    """Parameters of the model."""
    yield from tables.parameters(config)
    for layer, path in enumerate(config.layers):
        yield from (spec.within(path) for spec in layer_specs(config, layer))
    yield from mtp_specs(config)
    yield from streams.output_parameters(config)
    yield from norm.parameters("final_norm", config)


def mtp_specs(config: ModelConfig) -> Specs:
    """Parameters of multi-token prediction."""
    for depth in range(config.num_mtp_layers):
        path = f"{multi_token_prediction.PREFIX}{depth}"
        yield from (spec.within(path) for spec in multi_token_prediction.own_parameters(config))
        yield from (spec.within(f"{path}.layer") for spec in layer_specs(config, config.num_layers + depth))


def layer_specs(config: ModelConfig, layer: int) -> Specs:
    """Parameters of layer number `layer`, by their names within the layer."""
    for name in norm.OF_BLOCK[config.block]:
        yield from norm.parameters(name, config)
    yield from attention_specs(config)
    yield from indexer.parameters(config, layer)
    has_experts = config.has_experts(layer)
    yield from experts.parameters(config) if has_experts else mlp.parameters("mlp", config, config.ffn_size)
    yield from streams.parameters(config, layer)


def attention_specs(config: ModelConfig) -> list[ParameterSpec]:
    """Parameters of a layer's attention, without those of sparse attention."""
    if config.latent:
        return [*latent_attention.parameters(config, config.latent)]
    return [*attention.parameters(config)]


def decoder_specs(config: ModelConfig) -> ParameterSpecs:
    """Parameters of the model by name, the rules of their initial values resolved."""
    numbers = init_numbers(config)
    return ParameterSpecs.of(spec._replace(init=spec.init.resolved(numbers)) for spec in parameter_specs(config))


def init_numbers(config: ModelConfig) -> dict[InitRule, float]:
    """The number of each rule of initial values."""
    attention_gain, mlp_gain = config.sandwich_gains
    output_std = config.output_init_std
    if output_std is None:
        output_std = config.init_std / math.sqrt(2 * config.num_layers)
    numbers: dict[InitRule, float] = {
        "embedding_std": config.embedding_init_std,
        "qkv_std": config.qkv_init_std,
        "matrix_std": config.init_std,
        "output_std": output_std,
        "attention_gain": attention_gain,
        "mlp_gain": mlp_gain,
    }
    return {rule: float(number) for rule, number in numbers.items()}


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Shape of each parameter of the model."""
    return {spec.name: spec.shape for spec in parameter_specs(config)}


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters of the full model."""
    return sum(math.prod(spec.shape) for spec in parameter_specs(config))
