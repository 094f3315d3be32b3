# SPDX-License-Identifier: Apache-2.0
"""Names and config.json of openPangu 2.0 (Flash and Pro).

Source: Huawei's modelling file of openpangu_v2 for transformers; of multi-token prediction vLLM's openpangu_mtp.py. The
former counts where they differ: convolutions change nothing at the first width - 1 tokens of a document, a window counts
the token itself, the norms of latents and of the indexer's keys have an epsilon of 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pangu.latent_weights import (
    COPIES,
    SANDWICH,
    latent_names,
    read_experts,
    read_latent,
    read_mtp,
    with_mtp,
    written_experts,
    written_latent,
    written_mtp,
)
from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.published import PublishedFormat, only

NAME = "openPangu 2.0"


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    only(values, {"sandwich_norm": True, "param_sink_with_value": True, "mhc_use_gamma": True})
    fields = {**read_latent(values, 6.4e6, False), **read_mtp(values), "block": "sandwich"}
    width = values["router_sliding_window"] if values.get("use_mome", False) else 0
    fields["latent"] |= {"num_sinks": values.get("param_sink_number") or 0, "conv_width": width}
    fields["experts"] = read_experts(values, bool(values.get("router_enable_expert_bias", True)))
    if values.get("use_mhc", False):
        fields["streams"] = {
            "num_streams": values["mhc_num_stream"],
            "rounds": values.get("mhc_recur_norm", 20),
            "norm_layers": values.get("block_post_layernorm_idx") or [],
        }
    elif values.get("block_post_layernorm_idx"):
        raise ConfigError("block_post_layernorm_idx is for use_mhc true; without streams no layer's output is normed")
    layers = values.get("dsa_layers") or []
    if layers:
        names = {"top_k": "index_topk", "num_heads": "index_n_heads", "head_dim": "index_head_dim"}
        fields["indexer"] = {"layers": layers, **{ours: values[theirs] for ours, theirs in names.items()}}
    windows = _windows(values, fields["num_layers"] + fields["num_mtp_layers"])
    return {**fields, "windows": windows if any(windows) else []}


def _windows(values: Mapping[str, Any], layers: int) -> list[int]:
    """Window of each layer, those of multi-token prediction after the others; 0: all tokens."""
    found, with_window = [0] * layers, values.get("swa_layers") or []
    width = values.get("sliding_window")
    widths = values.get("sliding_window_list") or [width] * len(with_window)
    if len(widths) != len(with_window):
        raise ConfigError(f"sliding_window_list has {len(widths)} entries for the {len(with_window)} of swa_layers")
    for layer, window in zip(with_window, widths, strict=True):
        if not isinstance(layer, int) or not 0 <= layer < layers:
            raise ConfigError(f"swa_layers: there is no layer {layer!r}; the last one is {layers - 1}")
        if not isinstance(window, int) or window < 1:
            raise ConfigError(f"sliding_window or sliding_window_list: {window!r} is not a window for layer {layer}")
        found[layer] = window
    return found


def _write(config: ModelConfig) -> dict[str, Any]:
    values, latent = written_latent(config, NAME)
    of_experts, experts = written_experts(config, NAME)
    if config.block != "sandwich" or latent.norm_epsilon != 1e-6:
        raise ConfigError(
            f"not a network that can be written as {NAME}: its blocks are not sandwich, or its latent norms' epsilon is not "
            "1e-6"
        )
    with_window = [layer for layer, window in enumerate(config.windows) if window]
    written = {
        "architectures": ["OpenPanguV2ForCausalLM"],
        "model_type": "openpangu_v2",
        **values,
        **of_experts,
        "sandwich_norm": True,
        "router_enable_expert_bias": experts.has_bias,
        **written_mtp(config, NAME),
        "param_sink_number": latent.num_sinks,
        "param_sink_with_value": True,
        "use_mome": latent.conv_width > 0,
        "use_mhc": config.streams is not None,
        "swa_layers": with_window,
        "sliding_window_list": [config.windows[layer] for layer in with_window],
    }
    if latent.conv_width:
        written["router_sliding_window"] = latent.conv_width
    if with_window:
        written["sliding_window"] = config.windows[with_window[0]]
    if config.streams:
        written |= {"mhc_num_stream": config.streams.num_streams, "mhc_recur_norm": config.streams.rounds}
        written |= {"mhc_use_gamma": True, "block_post_layernorm_idx": list(config.streams.norm_layers)}
    if config.indexer:
        indexer = config.indexer
        written |= {"dsa_layers": list(indexer.layers), "index_topk": indexer.top_k}
        written |= {"index_n_heads": indexer.num_heads, "index_head_dim": indexer.head_dim}
    return written


def _gates(theirs: str, ours: str, last: str = "") -> dict[str, tuple[str, ...]]:
    return {
        f"{theirs}phi{{}}weight": (f"{ours}.gates.weight",),
        f"{theirs}norm_gamma": (f"{ours}.norm.weight",),
        f"{theirs}branch_alpha{last}": (f"{ours}.alpha",),
        f"{theirs}branch_beta{last}": (f"{ours}.beta",),
    }


def _of_layer() -> dict[str, tuple[str, ...]]:
    """Names of what openPangu 2.0 has besides latent attention, in a layer."""
    conv = {"qa": "query", "compresskv": "kv", "o": "output"}
    indexer = {"wq_b": "query", "wk": "key", "k_norm": "key_norm", "weights_proj": "weights"}
    streams = {
        name.replace("{}", "__"): parts
        for part, ours in (("attn", "attention_streams"), ("mlp", "mlp_streams"))
        for name, parts in _gates(f"{part}_mhc_module__", ours).items()
    }
    return {
        **{f"self_attn__{theirs}_conv__weight": (f"attention.{ours}_conv.weight",) for theirs, ours in conv.items()},
        **{
            f"self_attn__indexer__{theirs}__weight": (f"attention.indexer.{ours}.weight",)
            for theirs, ours in indexer.items()
        },
        "self_attn__param_sink_compressed_kv": ("attention.sink_latents",),
        "self_attn__param_sink_k_pe": ("attention.sink_keys",),
        "block_post_layernorm__weight": ("block_norm.weight",),
        **streams,
    }


_NAMES = {
    **with_mtp(latent_names("mlp__e_score_correction_bias", **SANDWICH, **_of_layer())),
    **{
        name.replace("{}", "."): parts
        for name, parts in _gates("model.merge_mhc_module.", "streams_out", "_pre").items()
    },
}
TWO = PublishedFormat("openpangu_v2", _NAMES, _read, _write, copies=COPIES)
