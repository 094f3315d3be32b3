# SPDX-License-Identifier: Apache-2.0
"""Names of PanGu's weights and configurations where they are published.

Source: PanGu-alpha: PanguAlpha pytorch tools/change_MspCkpt_ToMgt.py, pcl_pangu src/pangu_alpha.py. openPangu-Embedded:
config.json and model.safetensors.index.json of openPangu-Embedded-7B-V1.1; it is Llama's network with biases.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pangu.config import OPEN_PANGU, PRO_MOE
from pangu.latent_weights import DEEPSEEK, ULTRA
from pangu.two_weights import TWO
from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.published import (
    PublishedFormat,
    end_tokens,
    eos_token_id,
    llama_names,
    only,
    read_rope,
    require,
    rope_theta,
)
from sporeloom.models.rope_scaling import written_scaling
from sporeloom.models.weight_names import decoder_tables

TABLES = decoder_tables(word_and_position="backbone.")

# Other spellings seen in published files, rewritten before the table is read.
ALIASES = {
    "mindspore": {
        "backbone.embedding.word_embedding.": "backbone.word_embedding.",
        "backbone.embedding.position_embedding.": "backbone.position_embedding.",
    },
    "megatron": {"module.": "", "model.": ""},
}


def _read(values: Mapping[str, Any], width: str = "intermediate_size", theta: float = 10000.0) -> dict[str, Any]:
    """config.json of openPangu-Embedded, or of a Llama with `attention_bias`. `width`: the key of the MLP's; `theta`: of RoPE
    where it is not said."""
    only(values, {"hidden_act": ("silu", "swish"), "mlp_bias": False, "attention_dropout": 0.0})
    rope = read_rope(values)
    if rope.rotated not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor is {rope.rotated}; only 1 is supported")
    if values.get("param_sink_number"):
        raise ConfigError("param_sink_number: a network with sink tokens (openPangu-R), which is not supported")
    biases = bool(values.get("bias", values.get("attention_bias", False)))
    std = values.get("initializer_range", 0.02)
    return {
        **OPEN_PANGU,
        **end_tokens(values),
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"],
        "num_heads": values["num_attention_heads"],
        "num_kv_heads": values.get("num_key_value_heads"),
        "head_dim": values.get("head_dim"),
        "ffn_hidden_size": values[width],
        "seq_len": values.get("max_position_embeddings", 2048),
        "layer_norm_epsilon": values.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(rope, theta),
        "rope_scaling": rope.scaling,
        "qkv_bias": biases,
        "output_bias": biases,
        "tied_embedding": bool(values.get("tie_word_embeddings", False)),
        **dict.fromkeys(("qkv_init_std", "init_std", "output_init_std"), std),
    }


def _read_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of Pangu Pro MoE (V1). Source: configuration_pangu_moe.py of its release; arXiv:2505.21411."""
    only(values, {"mlp_only_layers": [], "decoder_sparse_step": 1})
    experts = {
        **PRO_MOE,
        "balance_over": "batch",
        "num_experts": values["num_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "ffn_hidden_size": values["moe_intermediate_size"],
        "shared_ffn_hidden_size": values["shared_expert_intermediate_size"],
        "balance_loss": values.get("router_aux_loss_coef", 0.001),
    }
    biases = {"qkv_bias": values.get("attention_bias", True), "output_bias": values.get("attention_bias", True)}
    return {**_read(values, "moe_intermediate_size", 1.6e7), **biases, "experts": experts}


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None or any(getattr(experts, name) != value for name, value in PRO_MOE.items()):
        wanted = ", ".join(f"{name} {value}" for name, value in PRO_MOE.items())
        raise ConfigError(f"not a network that can be written as Pangu Pro MoE: its experts are not {wanted}")
    if experts.normalize != "none" or experts.routed_scaling_factor != 1.0 or experts.balance_bias_rate:
        raise ConfigError(
            "not a network that can be written as Pangu Pro MoE: it normalizes, scales or corrects the router"
        )
    if not all(map(config.has_experts, range(config.num_layers))) or not config.qkv_bias:
        raise ConfigError(
            "not a network that can be written as Pangu Pro MoE: layers without experts or without biases"
        )
    values = _write(dataclasses.replace(config, experts=None))
    values.pop("intermediate_size")
    return {
        "architectures": ["PanguProMoEForCausalLM"],
        "model_type": "PanguProMoE",
        **values,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "router_aux_loss_coef": experts.balance_loss,
        "output_router_logits": True,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    if config.experts:
        raise ConfigError("not a network that can be written as openPangu-Embedded: it has experts")
    parts = {"block": "sequential", "rope_pairs": "half", "rotated": config.head_size, "output_bias": config.qkv_bias}
    require(config, {**OPEN_PANGU, **parts, "logits_scale": 1.0}, "openPangu-Embedded")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.layer_norm_epsilon,
        "rope_theta": config.rope_theta,
        **written_scaling(config.rope_scaling),
        "tie_word_embeddings": config.tied_embedding,
        "initializer_range": config.init_std,
        "eos_token_id": eos_token_id(config),
        "torch_dtype": "float32",
    }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    biases = {"attention_bias": config.qkv_bias, "mlp_bias": False}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_write(config), **biases}


def _write_pangu(config: ModelConfig) -> dict[str, Any]:
    own = {"architectures": ["PanguEmbeddedForCausalLM"], "model_type": "PanguEmbedded"}
    return {**own, **_write(config), "bias": config.qkv_bias}


_NAMES = llama_names(
    mlp__gate_proj__weight=("mlp.gate.weight",),
    mlp__up_proj__weight=("mlp.up.weight",),
)
_MOE_NAMES = llama_names(
    mlp__gate__weight=("mlp.router.weight",),
    mlp__router_scale=("mlp.weights.scale",),
    **{
        f"mlp__{theirs}__{name}_proj__weight": (f"mlp.{ours}.{name}.weight",)
        for theirs, ours in (("experts__{e}", "experts"), ("shared_expert", "shared"))
        for name in ("gate", "up", "down")
    },
)
PUBLISHED = (
    PublishedFormat("llama", _NAMES, _read, _write_llama),  # what transformers opens
    PublishedFormat("PanguEmbedded", _NAMES, _read, _write_pangu),
    PublishedFormat("PanguProMoE", _MOE_NAMES, _read_moe, _write_moe),
    DEEPSEEK,
    ULTRA,
    TWO,
)
