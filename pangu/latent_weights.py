# SPDX-License-Identifier: Apache-2.0
"""Names and config.json of published models with latent attention and sigmoid routers.

Source: DeepSeek-V3: modeling_deepseek_v3.py of transformers 4.57, whose latent norms have an epsilon of 1e-6 whatever
rms_norm_eps is; its multi-token prediction: vLLM's deepseek_mtp.py, whose layers read hidden states after the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pangu.config import OPEN_PANGU
from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig, MTPInput
from sporeloom.models.parts.experts import ExpertConfig
from sporeloom.models.parts.latent_attention import LatentConfig
from sporeloom.models.published import (
    LAYER,
    MTP,
    PublishedFormat,
    end_tokens,
    eos_token_id,
    llama_names,
    only,
    read_rope,
    require,
    rope_theta,
)
from sporeloom.models.published_keys import TrackedKeys
from sporeloom.models.rope_scaling import written_scaling

SIGMOID: dict[str, Any] = {"router": "sigmoid"}
"""Router of DeepSeek-V3 and of the Pangu models after it."""


def read_latent(values: Mapping[str, Any], theta: float | None = None, interleaved: bool = True) -> dict[str, Any]:
    """Fields of a model with latent attention but for its experts. `theta`, `interleaved`: of RoPE where
    they are not given."""
    only(values, {"hidden_act": ("silu", "swish"), "attention_dropout": 0.0, "mlp_bias": False})
    rope = read_rope(values)
    if rope.rotated not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor is {rope.rotated}; only 1 is supported")
    heads = values.get("num_key_value_heads")
    if heads not in (None, values["num_attention_heads"]):
        raise ConfigError(
            f"num_key_value_heads is {heads}; latent attention has as many as num_attention_heads "
            f"{values['num_attention_heads']}"
        )
    values.get("head_dim"), values.get("qk_head_dim")  # follow from the parts
    bias, std = bool(values.get("attention_bias", False)), values.get("initializer_range", 0.02)
    latent = {
        "kv_width": values["kv_lora_rank"],
        "query_width": values.get("q_lora_rank"),
        "nope_dim": values["qk_nope_head_dim"],
        "rope_dim": values["qk_rope_head_dim"],
        "value_dim": values["v_head_dim"],
        "norm_epsilon": values.get("latent_norm_eps") or 1e-6,
    }
    return {
        **OPEN_PANGU,
        **end_tokens(values),
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"],
        "num_heads": values["num_attention_heads"],
        "ffn_hidden_size": values["intermediate_size"],
        "seq_len": values.get("max_position_embeddings", 4096),
        "layer_norm_epsilon": values.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(rope, theta),
        "rope_scaling": rope.scaling,
        "rope_pairs": "adjacent" if values.get("rope_interleave", interleaved) else "half",
        "qkv_bias": bias,
        "output_bias": bias,
        "tied_embedding": bool(values.get("tie_word_embeddings", False)),
        "latent": {name: value for name, value in latent.items() if value is not None},
        **dict.fromkeys(("qkv_init_std", "init_std", "output_init_std"), std),
    }


def read_experts(values: Mapping[str, Any], bias: bool) -> dict[str, Any] | None:
    """Fields of its experts; None: every layer has an MLP. `bias`: experts are chosen with a correction bias."""
    only(values, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
    dense = values.get("first_k_dense_replace") or 0
    width, shared = values["moe_intermediate_size"], values.get("n_shared_experts") or 0
    experts = {
        **SIGMOID,
        "correction_bias": bias,
        "num_experts": values["n_routed_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "num_groups": values.get("n_group") or 1,
        "groups_per_token": values.get("topk_group") or 1,
        "normalize": "before_drop" if values.get("norm_topk_prob", True) else "none",
        "routed_scaling_factor": values.get("routed_scaling_factor", 1.0),
        "ffn_hidden_size": width,
        "shared_ffn_hidden_size": shared * width,
        "first_dense_layers": dense,
    }
    return experts if dense < values["num_hidden_layers"] else None


def _read_deepseek(values: Mapping[str, Any]) -> dict[str, Any]:
    """Source: configuration_deepseek_v3.py of transformers 4.57, whose defaults these are."""
    return {**read_latent(values, 10000.0), **read_mtp(values, "after_norm"), "experts": read_experts(values, True)}


_FIRST_RELEASE = {
    "q_lora_rank": "attention_q_lora_dim",
    "kv_lora_rank": "attention_kv_lora_dim",
    "qk_nope_head_dim": "attention_qk_dim",
    "qk_rope_head_dim": "attention_qk_rope_dim",
    "v_head_dim": "attention_v_dim",
    "n_routed_experts": "num_routed_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "num_nextn_predict_layers": "num_mtp_layers",
}
"""Key of config.json -> the same in the first release of Pangu Ultra MoE."""


def _with_later_keys(values: Mapping[str, Any]) -> TrackedKeys:
    """config.json with the later one of two keys for the same.

    Raises:
        ConfigError: both are there and contradict each other.
    """
    both = {later: first for later, first in _FIRST_RELEASE.items() if first in values and later in values}
    if wrong := [(later, first) for later, first in both.items() if values[first] != values[later]]:
        raise ConfigError(
            f"{later} {values[later]!r} and {first} {values[first]!r} contradict each other; leave one"
            for later, first in wrong
        )
    found = {later: values[first] for later, first in _FIRST_RELEASE.items() if first in values}
    keys = TrackedKeys({**values, **found})
    if isinstance(values, TrackedKeys):
        keys.asked = values.asked
    return keys


def _read_ultra(given: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of Pangu Ultra MoE. Source: configuration of its release (transformers PR 42229); vLLM openpangu.py."""
    values = _with_later_keys(given)
    if values.get("sandwich_norm") is not True:
        raise ConfigError(f"sandwich_norm is {values.get('sandwich_norm')!r}; only True is supported")
    bias = bool(values.get("router_enable_expert_bias", False))
    return {
        **read_latent(values, 2.56e7),
        **read_mtp(values),
        "block": "sandwich",
        "experts": read_experts(values, bias),
    }


def read_mtp(values: Mapping[str, Any], mtp_input: MTPInput = "before_norm") -> dict[str, Any]:
    """Fields of multi-token prediction. `mtp_input`: what its layers read in models of this kind."""
    weight, depths = values.get("mtp_loss_weight"), values.get("num_nextn_predict_layers") or 0
    given = {} if weight is None else {"mtp_loss_weight": weight}
    return {"num_mtp_layers": depths, **given, **({"mtp_input": mtp_input} if depths else {})}


def written_mtp(config: ModelConfig, name: str, mtp_input: MTPInput = "before_norm") -> dict[str, Any]:
    """The keys of config.json for multi-token prediction.

    Raises:
        ConfigError: its layers read something else than in models of this kind.
    """
    if config.num_mtp_layers and config.mtp_input != mtp_input:
        raise ConfigError(
            f"not a network that can be written as {name}: mtp_input {config.mtp_input!r} instead of {mtp_input!r}"
        )
    return {"num_nextn_predict_layers": config.num_mtp_layers, "mtp_loss_weight": config.mtp_loss_weight}


def _write_ultra(config: ModelConfig) -> dict[str, Any]:
    name = "Pangu Ultra MoE"
    values, latent = written_latent(config, name)
    of_experts, experts = written_experts(config, name)
    if config.block != "sandwich":
        raise ConfigError(f"not a network that can be written as {name}: its blocks are not sandwich")
    kind = {"architectures": ["PanguUltraMoEForCausalLM"], "model_type": "pangu_ultra_moe"}
    return {
        **kind,
        **values,
        **of_experts,
        "sandwich_norm": True,
        "latent_norm_eps": latent.norm_epsilon,
        "router_enable_expert_bias": experts.has_bias,
        **written_mtp(config, name),
    }


def written_latent(config: ModelConfig, name: str) -> tuple[dict[str, Any], LatentConfig]:
    """The keys of config.json besides those of experts.

    Raises:
        ConfigError: a network that they cannot express.
    """
    require(config, {**OPEN_PANGU, "output_bias": config.qkv_bias, "logits_scale": 1.0}, name)
    if config.latent is None:
        raise ConfigError(f"not a network that can be written as {name}: it has no latent attention")
    latent = config.latent
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": latent.query_width,
        "kv_lora_rank": latent.kv_width,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.layer_norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_interleave": config.rope_pairs == "adjacent",
        **written_scaling(config.rope_scaling),
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tied_embedding,
        "initializer_range": config.init_std,
        "eos_token_id": eos_token_id(config),
        "torch_dtype": "float32",
    }, latent


def written_experts(config: ModelConfig, name: str) -> tuple[dict[str, Any], ExpertConfig]:
    """The keys of config.json for experts.

    Raises:
        ConfigError: experts that they cannot express.
    """
    experts, width = config.experts, config.expert_size
    if experts is None:
        raise ConfigError(f"not a network that can be written as {name}: it has no experts")
    shared = experts.shared_ffn_hidden_size
    if (experts.router, experts.router_scale, experts.layer_frequency) != ("sigmoid", False, 1) or shared % width:
        raise ConfigError(
            f"not a network that can be written as {name}: its experts are not of a sigmoid router in every layer, with a "
            "shared expert of a multiple of their width"
        )
    if experts.normalize == "after_drop":
        raise ConfigError(f"not a network that can be written as {name}: experts.normalize is after_drop")
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "n_group": experts.num_groups,
        "topk_group": experts.groups_per_token,
        "norm_topk_prob": experts.normalize != "none",
        "routed_scaling_factor": experts.routed_scaling_factor,
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "first_k_dense_replace": experts.first_dense_layers,
    }, experts


def _write_deepseek(config: ModelConfig) -> dict[str, Any]:
    name = "DeepSeek-V3"
    values, latent = written_latent(config, name)
    of_experts, experts = written_experts(config, name)
    if config.block != "sequential" or not experts.has_bias or latent.norm_epsilon != 1e-6:
        raise ConfigError(
            f"not a network that can be written as {name}: its blocks are not sequential, its router has no correction bias, "
            "or its latent norms' epsilon is not 1e-6"
        )
    kind = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    mtp = written_mtp(config, name, "after_norm") if config.num_mtp_layers else {"num_nextn_predict_layers": 0}
    return {**kind, **values, **of_experts, **mtp, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def latent_names(bias: str, **more: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Names of all weights. `bias`: that of the router's; `more`: see `llama_names`."""
    attention: dict[str, tuple[str, ...]] = {
        **{f"self_attn__q_proj__{kind}": (f"attention.query.{kind}",) for kind in ("weight", "bias")},
        **{f"self_attn__q_a_proj__{kind}": (f"attention.query_down.{kind}",) for kind in ("weight", "bias")},
        "self_attn__q_b_proj__weight": ("attention.query_up.weight",),
        "self_attn__q_a_layernorm__weight": ("attention.query_norm.weight",),
        **{f"self_attn__kv_a_proj_with_mqa__{kind}": (f"attention.kv_down.{kind}",) for kind in ("weight", "bias")},
        "self_attn__kv_a_layernorm__weight": ("attention.kv_norm.weight",),
        "self_attn__kv_b_proj__weight": ("attention.kv_up.weight",),
    }
    mlp = {
        f"mlp__{theirs}{name}_proj__weight": (f"mlp.{ours}{name}.weight",)
        for theirs, ours in (("", ""), ("experts__{e}__", "experts."), ("shared_experts__", "shared."))
        for name in ("gate", "up", "down")
    }
    router = {"mlp__gate__weight": ("mlp.router.weight",), bias: ("mlp.choices.balance_bias",)}
    return llama_names(**attention, **mlp, **router, **more)


SANDWICH = {
    "post_attention_layernorm__weight": ("attention_output_norm.weight",),
    "pre_mlp_layernorm__weight": ("mlp_norm.weight",),
    "post_mlp_layernorm__weight": ("mlp_output_norm.weight",),
}


def with_mtp(names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The names, and those of multi-token prediction layers. Source: vLLM openpangu_mtp.py."""
    ours, theirs = f"mtp.{MTP}.", f"model.layers.{MTP}."
    own = {
        "enorm.weight": "embedding_norm.weight",
        "hnorm.weight": "hidden_norm.weight",
        "eh_proj.weight": "project.weight",
        "shared_head.norm.weight": "head_norm.weight",
    }
    layers = {
        name.replace(LAYER, MTP): tuple(part.replace(f"layers.{LAYER}.", f"{ours}layer.") for part in parts)
        for name, parts in names.items()
        if LAYER in name
    }
    return {**names, **layers, **{theirs + name: (ours + part,) for name, part in own.items()}}


COPIES = {
    f"model.layers.{MTP}.embed_tokens.weight": "embedding.word.weight",
    f"model.layers.{MTP}.shared_head.head.weight": "head.weight",
}
"""Tensors that layers of multi-token prediction may be published with, too."""
DEEPSEEK = PublishedFormat(
    "deepseek_v3",
    with_mtp(latent_names("mlp__gate__e_score_correction_bias")),
    _read_deepseek,
    _write_deepseek,
    copies=COPIES,
)
ULTRA = PublishedFormat(
    "pangu_ultra_moe",
    with_mtp(latent_names("mlp__gate__e_score_correction_bias", **SANDWICH)),
    _read_ultra,
    _write_ultra,
    copies=COPIES,
)
