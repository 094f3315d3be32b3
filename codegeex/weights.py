# SPDX-License-Identifier: Apache-2.0
"""Names of CodeGeeX's weights and configurations where they are published.

Source: CodeGeeX: THUDM/CodeGeeX codegeex/megatron/mindspore_to_megatron.py, codegeex/mindspore/src/pangu_alpha.py. CodeGeeX2
and 4: config.json and modeling_chatglm.py of THUDM/codegeex2-6b and THUDM/codegeex4-all-9b; transformers' Glm is the same
network.
"""

import math
from collections.abc import Mapping
from typing import Any

from codegeex.config import GLM
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

TABLES = decoder_tables(word_and_position="backbone.embedding.")

# Other spellings seen in published files, rewritten before the table is read.
ALIASES = {
    "mindspore": {
        "backbone.word_embedding.": "backbone.embedding.word_embedding.",
        "backbone.position_embedding.": "backbone.embedding.position_embedding.",
    },
    "megatron": {"module.": "", "model.": ""},
}


def _read_chatglm(values: Mapping[str, Any]) -> dict[str, Any]:
    only(
        values,
        {
            "rmsnorm": True,
            "post_layer_norm": True,
            "add_bias_linear": False,
            "original_rope": True,
            "apply_residual_connection_post_layernorm": False,
            "multi_query_attention": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "pre_seq_len": None,
        },
    )
    return {
        **GLM,
        **end_tokens(values),
        "vocab_size": values["padded_vocab_size"],
        "hidden_size": values["hidden_size"],
        "num_layers": values["num_layers"],
        "num_heads": values["num_attention_heads"],
        "num_kv_heads": values["multi_query_group_num"],
        "head_dim": values["kv_channels"],
        "ffn_hidden_size": values["ffn_hidden_size"],
        "seq_len": values["seq_length"],
        "layer_norm_epsilon": values["layernorm_epsilon"],
        "rope_theta": 10000.0 * values.get("rope_ratio", 1),
        "rope_dim": values["kv_channels"] // 2,
        "qkv_bias": values["add_qkv_bias"],
        "tied_embedding": bool(values.get("tie_word_embeddings", False)),
    }


def _write_chatglm(config: ModelConfig) -> dict[str, Any]:
    _check(config)
    require(config, {"rotated": config.head_size // 2, "rope_scaling": None}, "CodeGeeX2 or CodeGeeX4")
    return {
        "architectures": ["ChatGLMForConditionalGeneration"],
        "model_type": "chatglm",
        "padded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "multi_query_attention": True,
        "multi_query_group_num": config.kv_heads,
        "kv_channels": config.head_size,
        "ffn_hidden_size": config.ffn_size,
        "seq_length": config.seq_len,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "rope_ratio": config.rope_theta / 10000.0,
        "rmsnorm": True,
        "post_layer_norm": True,
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "original_rope": True,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": config.tied_embedding,
        "eos_token_id": eos_token_id(config),
        "torch_dtype": "float32",
    }


def _read_glm(values: Mapping[str, Any]) -> dict[str, Any]:
    only(values, {"hidden_act": ("silu", "swish"), "attention_dropout": 0.0})
    rope = read_rope(values)
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return {
        **GLM,
        **end_tokens(values),
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"],
        "num_heads": values["num_attention_heads"],
        "num_kv_heads": values["num_key_value_heads"],
        "head_dim": head_dim,
        "ffn_hidden_size": values["intermediate_size"],
        "seq_len": values["max_position_embeddings"],
        "layer_norm_epsilon": values["rms_norm_eps"],
        "rope_theta": rope_theta(rope),
        "rope_scaling": rope.scaling,
        "rope_dim": int(head_dim * (0.5 if rope.rotated is None else rope.rotated)),
        "qkv_bias": values["attention_bias"],
        "tied_embedding": bool(values.get("tie_word_embeddings", False)),
    }


def _write_glm(config: ModelConfig) -> dict[str, Any]:
    _check(config)
    return {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.layer_norm_epsilon,
        "rope_theta": config.rope_theta,
        **written_scaling(config.rope_scaling),
        "partial_rotary_factor": _share(config.rotated, config.head_size),
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tied_embedding,
        "eos_token_id": eos_token_id(config),
        "pad_token_id": config.eod_id,
        "torch_dtype": "float32",
    }


def _share(part: int, whole: int) -> float:
    """Part / whole, rounded so that int(whole * result) is `part` again."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 1.0)


def _check(config: ModelConfig) -> None:
    """Raises:
    ConfigError: not the network that CodeGeeX2 and 4 are, but for how much of a head is turned.
    """
    parts = {name: part for name, part in GLM.items() if not name.endswith("_std")}
    fixed = {"block": "sequential", "logits_scale": 1.0}
    require(config, {**parts, **fixed}, "CodeGeeX2 or CodeGeeX4")


_GATE_UP = ("mlp.gate.weight", "mlp.up.weight")
_GLM = llama_names(mlp__gate_up_proj__weight=_GATE_UP)
_CHATGLM = {
    "transformer.embedding.word_embeddings.weight": ("embedding.word.weight",),
    **{
        f"transformer.encoder.layers.{{i}}.{theirs}": tuple(f"layers.{{i}}.{part}" for part in ours)
        for theirs, ours in {
            "input_layernorm.weight": ("attention_norm.weight",),
            "self_attention.query_key_value.weight": tuple(f"attention.{p}.weight" for p in ("query", "key", "value")),
            "self_attention.query_key_value.bias": tuple(f"attention.{p}.bias" for p in ("query", "key", "value")),
            "self_attention.dense.weight": ("attention.output.weight",),
            "post_attention_layernorm.weight": ("mlp_norm.weight",),
            "mlp.dense_h_to_4h.weight": _GATE_UP,
            "mlp.dense_4h_to_h.weight": ("mlp.down.weight",),
        }.items()
    },
    "transformer.encoder.final_layernorm.weight": ("final_norm.weight",),
    "transformer.output_layer.weight": ("head.weight",),
}
PUBLISHED = (
    PublishedFormat("glm", _GLM, _read_glm, _write_glm),  # what transformers opens
    PublishedFormat("chatglm", _CHATGLM, _read_chatglm, _write_chatglm),
)
