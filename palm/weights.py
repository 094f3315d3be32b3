# SPDX-License-Identifier: Apache-2.0
"""Names of PaLM's weights elsewhere. Google published none; the names are those of the package PaLM-pytorch 0.2.2."""

from collections.abc import Mapping
from typing import Any

from palm.config import PALM
from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.published import PublishedFormat, end_tokens, eos_token_id, only, require
from sporeloom.models.weight_names import Name

TABLES: dict[str, dict[str, Name]] = {}
ALIASES: dict[str, dict[str, str]] = {}


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    only(values, {"rope_pairing": "half", "tie_word_embeddings": True})
    return {
        **PALM,
        **end_tokens(values),
        "vocab_size": values["num_tokens"],
        "hidden_size": values["dim"],
        "num_layers": values["depth"],
        "num_heads": values["heads"],
        "head_dim": values["dim_head"],
        "ffn_hidden_size": values["ff_mult"] * values["dim"],
        "seq_len": values.get("seq_len", 2048),
        "layer_norm_epsilon": values.get("layer_norm_eps", 1e-5),
        "rope_theta": values.get("rope_theta", 10000.0),
        "logits_scale": values.get("logits_scale", 1.0),
        "z_loss": values.get("z_loss_coef", 0.0),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    parts = {
        "norm": "layer",
        "rope_pairs": "half",
        "rotated": config.head_size,
        "tied_embedding": True,
        "rope_scaling": None,
    }
    require(config, {**PALM, **parts}, "PaLM")
    if config.ffn_size % config.hidden_size:
        raise ConfigError(f"PaLM's MLP is a multiple of hidden_size {config.hidden_size}, not {config.ffn_size} wide")
    return {
        "model_type": "palm",
        "num_tokens": config.vocab_size,
        "dim": config.hidden_size,
        "depth": config.num_layers,
        "heads": config.num_heads,
        "dim_head": config.head_size,
        "ff_mult": config.ffn_size // config.hidden_size,
        "seq_len": config.seq_len,
        "layer_norm_eps": config.layer_norm_epsilon,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embedding,
        "logits_scale": config.logits_scale,
        "z_loss_coef": config.z_loss,
        "eos_token_id": eos_token_id(config),
    }


_FUSED = ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate")
_NAMES = {
    "0.weight": ("embedding.word.weight",),
    "{i}.fn.norm.gamma": ("layers.{i}.attention_norm.weight",),
    "{i}.fn.fused_attn_ff_proj.weight": tuple(f"layers.{{i}}.{part}.weight" for part in _FUSED),
    "{i}.fn.attn_out.weight": ("layers.{i}.attention.output.weight",),
    "{i}.fn.ff_out.1.weight": ("layers.{i}.mlp.down.weight",),
    # {n}: one after the last layer
    "{n}.gamma": ("final_norm.weight",),
}
PUBLISHED = (PublishedFormat("palm", _NAMES, _read, _write, first_layer=1),)
