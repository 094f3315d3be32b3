# SPDX-License-Identifier: Apache-2.0
"""The sizes of PanGu-alpha, openPangu-Embedded and Pangu Ultra, and scaled-down ones for laptops. PanGu-alpha's
`num_layers` counts the top query layer."""

import dataclasses
import math
from typing import Any

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.experts import ExpertConfig

OPEN_PANGU: dict[str, Any] = {
    "norm": "rms",
    "position": "rotary",
    "activation": "silu",
    "gated_mlp": True,
    "mlp_bias": False,
    "query_layer": False,
    "dropout_rate": 0.0,
}
"""Parts of openPangu-Embedded and Pangu Ultra. Source: config.json and modular_openpangu_dense.py of the former."""


PRO_MOE: dict[str, Any] = {"router": "grouped", "router_scale": True}
"""Router of Pangu Pro MoE: one expert of each group, weighted by its probability and a learned scale. Source:
arXiv:2505.21411 section 2.2, which balances over a batch; the sizes here over each sequence, so that
microbatches change nothing."""

TINY: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "seq_len": 128,
    "eod_id": 9,
    "loss_ignore_id": 6,
}
"""Dimensions for laptops and tests; the tokenizer is PanGu-alpha's."""


def _open_pangu(**values: Any) -> ModelConfig:
    shared: dict[str, Any] = {
        "vocab_size": 153376,
        "seq_len": 32768,
        "eod_id": 45892,
        "loss_ignore_id": 45892,
        "qkv_init_std": 0.02,
        "output_init_std": 0.02,
    }
    return ModelConfig(**{**OPEN_PANGU, **shared, **values})


def _ultra(hidden_size: int, num_layers: int, **values: Any) -> ModelConfig:
    """Pangu Ultra: sandwich norms whose second gains shrink with the depth, and TinyInit. No biases.

    Source: arXiv:2504.07866 sections 2.2 and 2.3.
    """
    std = 1 / math.sqrt(2 * hidden_size * num_layers)
    return _open_pangu(
        hidden_size=hidden_size,
        num_layers=num_layers,
        **{
            "block": "sandwich",
            "qkv_bias": False,
            "output_bias": False,
            "tied_embedding": False,
            "rope_theta": 1e4,
            "seq_len": 4096,
            "sandwich_gains": (0.283 / math.sqrt(num_layers), 0.432 / math.sqrt(num_layers)),
            "embedding_init_std": 0.5,
            "qkv_init_std": std,
            "init_std": std,
            "output_init_std": std,
            **values,
        },
    )


def _pro_moe(experts: tuple[int, int], expert_size: int, shared_size: int, **values: Any) -> ModelConfig:
    """`experts`: number of experts, and how many process each token."""
    mixture = {
        **PRO_MOE,
        "num_experts": experts[0],
        "experts_per_token": experts[1],
        "ffn_hidden_size": expert_size,
        "shared_ffn_hidden_size": shared_size,
        "balance_loss": 0.001,
    }
    return _open_pangu(ffn_hidden_size=expert_size, tied_embedding=False, experts=mixture, **values)


def _ultra_moe(latent: dict[str, int], experts: tuple[int, int], expert_size: int, **values: Any) -> ModelConfig:
    """Pangu Ultra MoE: sandwich norms, latent attention, sigmoid router, a shared expert, one layer that predicts the token
    after the next. `experts`: number of experts, and how many process each token.

    Source: arXiv:2505.04519; configuration of its release (transformers PR 42229). The weight of the further prediction is
    not published; DeepSeek-V3's first one.
    """
    mixture = {
        "router": "sigmoid",
        "num_experts": experts[0],
        "experts_per_token": experts[1],
        "normalize": "before_drop",
        "routed_scaling_factor": 2.5,
        "ffn_hidden_size": expert_size,
        "shared_ffn_hidden_size": expert_size,
    }
    shared: dict[str, Any] = {
        "block": "sandwich",
        "rope_theta": 2.56e7,
        "rope_pairs": "adjacent",
        "qkv_bias": False,
        "output_bias": False,
        "tied_embedding": False,
        "latent": latent,
        "num_mtp_layers": 1,
    }
    mixture["correction_bias"] = values.pop("experts_bias", False)
    dense = values.pop("first_dense_layers")
    return _open_pangu(**{**shared, **values}, experts={**mixture, "first_dense_layers": dense})


def _two(sparse: dict[str, int], windows: tuple[int, int], num_layers: int, **values: Any) -> ModelConfig:
    """openPangu 2.0: Pangu Ultra MoE's parts, residual streams, convolutions, sinks, and layers with sparse attention among
    those with windows. `windows`: of a layer, and of one of multi-token prediction.

    Source: published config.json values and configuration class. They do not say which layers have sparse attention or norm
    their streams: here each third and each fifth, which are as many as published. The folders themselves say it.
    """
    mtp = values.get("num_mtp_layers", 3)
    shared = {
        "rope_theta": 6.4e6,
        "rope_pairs": "half",
        "seq_len": 524288,
        "eod_id": 148902,
        "loss_ignore_id": 148902,
        "layer_norm_epsilon": 1e-5,
        "num_mtp_layers": mtp,
        "indexer": {"layers": range(0, num_layers, 3), **sparse},
        "windows": [*(windows[0] if layer % 3 else 0 for layer in range(num_layers)), *[windows[1]] * mtp],
        "streams": {"num_streams": 4, "norm_layers": range(4, num_layers, 5)},
    }
    return _ultra_moe(num_layers=num_layers, **{**shared, **values}, experts_bias=True)


def _with_experts(dense: ModelConfig, **experts: Any) -> ModelConfig:
    return dataclasses.replace(dense, experts=ExpertConfig(**experts))


_TINY_DIMENSIONS = {name: value for name, value in TINY.items() if name != "num_kv_heads"}
_TINY_LATENT = {"query_width": 48, "kv_width": 32, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
_TWO_LATENT = {
    "query_width": 1024,
    "kv_width": 512,
    "nope_dim": 128,
    "rope_dim": 64,
    "value_dim": 128,
    "num_sinks": 128,
    "conv_width": 3,
}

# Parameter counts as published: 350m 345,368,576; 2.6b 2,625,295,360; 13b 12,800,870,400; 200b 206,861,008,896.
SIZES = {
    # For laptops and tests. Without dropout every mesh computes exactly the same losses.
    "tiny": ModelConfig(vocab_size=2048, hidden_size=128, num_layers=4, num_heads=4, seq_len=128, dropout_rate=0.0),
    "350m": ModelConfig(vocab_size=40000, hidden_size=1024, num_layers=24, num_heads=16),
    "1.3b": ModelConfig(vocab_size=40000, hidden_size=2560, num_layers=16, num_heads=32),
    "2.6b": ModelConfig(vocab_size=40000, hidden_size=2560, num_layers=32, num_heads=32),
    "13b": ModelConfig(vocab_size=40000, hidden_size=5120, num_layers=40, num_heads=40),
    "200b": ModelConfig(vocab_size=40000, hidden_size=16384, num_layers=64, num_heads=128),
    # Every kind of part that the two below have.
    "embedded_tiny": _open_pangu(ffn_hidden_size=384, **TINY),
    # 1,155,912,192 and 8,030,887,936 parameters.
    "embedded_1b": _open_pangu(
        hidden_size=1536, num_layers=26, num_heads=12, num_kv_heads=6, ffn_hidden_size=6144, rope_theta=4e6
    ),
    "embedded_7b": _open_pangu(
        hidden_size=4096,
        num_layers=34,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=12800,
        rope_theta=1.6e7,
        tied_embedding=False,
    ),
    # 71,988,781,056 parameters, of which a token uses 16,498,139,136.
    "pro_moe_72b": _pro_moe(
        (64, 8),
        1344,
        5376,
        hidden_size=5120,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        rope_theta=1.6e7,
        seq_len=131072,
    ),
    "pro_moe_tiny": _pro_moe((8, 2), 64, 128, **TINY),
    # 719,093,767,680 parameters without the layer of multi-token prediction, of which a token uses 40,371,494,400.
    "ultra_moe_718b": _ultra_moe(
        {"query_width": 1536, "kv_width": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        (256, 8),
        2048,
        vocab_size=153600,
        hidden_size=7680,
        num_layers=61,
        num_heads=128,
        ffn_hidden_size=18432,
        first_dense_layers=3,
        seq_len=131072,
    ),
    "ultra_moe_tiny": _ultra_moe(
        _TINY_LATENT,
        (8, 2),
        64,
        ffn_hidden_size=256,
        first_dense_layers=1,
        **_TINY_DIMENSIONS,
    ),
    # 91,596,785,593 and 504,606,825,873 parameters without multi-token prediction, of which a token uses 5,781,325,753 and
    # 18,182,905,233.
    "2_flash": _two(
        {"top_k": 2048, "num_heads": 24, "head_dim": 128},
        (512, 2048),
        46,
        latent=_TWO_LATENT,
        experts=(256, 8),
        expert_size=1024,
        vocab_size=151552,
        hidden_size=2560,
        num_heads=48,
        ffn_hidden_size=9216,
        first_dense_layers=2,
    ),
    "2_pro": _two(
        {"top_k": 2048, "num_heads": 24, "head_dim": 128},
        (512, 2048),
        50,
        latent={**_TWO_LATENT, "query_width": 1536},
        experts=(384, 8),
        expert_size=1792,
        vocab_size=151552,
        hidden_size=5120,
        num_heads=64,
        ffn_hidden_size=16128,
        first_dense_layers=3,
    ),
    "2_tiny": _two(
        {"top_k": 48, "num_heads": 4, "head_dim": 32},
        (32, 64),
        num_mtp_layers=1,
        streams={"num_streams": 4, "norm_layers": (1,)},
        latent={**_TINY_LATENT, "num_sinks": 8, "conv_width": 3},
        experts=(8, 2),
        expert_size=64,
        ffn_hidden_size=256,
        first_dense_layers=1,
        **_TINY_DIMENSIONS,
    ),
    "ultra_135b": _ultra(12288, 94, num_heads=96, num_kv_heads=8, ffn_hidden_size=28672),
}

# PanGu-alpha with experts in every other layer: one of them for each token as in Switch, or two as in GShard.
_SWITCH: dict[str, Any] = {
    "experts_per_token": 1,
    "layer_frequency": 2,
    "capacity_factor": 1.25,
    "balance_loss": 0.01,
    "router_z_loss": 0.001,
}
_TOP_TWO = {**_SWITCH, "experts_per_token": 2, "normalize": "before_drop"}
SIZES |= {
    "switch_tiny": _with_experts(SIZES["tiny"], num_experts=8, **_SWITCH),
    "gshard_tiny": _with_experts(SIZES["tiny"], num_experts=8, **_TOP_TWO),
    "switch_2.6b": _with_experts(SIZES["2.6b"], num_experts=16, **_SWITCH),
    "gshard_13b": _with_experts(SIZES["13b"], num_experts=16, **_TOP_TWO),
    # PanGu-Sigma's shape: random experts by token id in the upper layers. Source: arXiv:2303.10845.
    "sigma_tiny": _with_experts(
        SIZES["tiny"],
        num_experts=8,
        experts_per_token=1,
        router="hash",
        first_dense_layers=1,
        capacity_factor=2.0,
    ),
    "sigma_1t": _with_experts(
        SIZES["13b"],
        num_experts=640,
        experts_per_token=1,
        router="hash",
        first_dense_layers=31,
        capacity_factor=2.0,
    ),
}

# Maximum and minimum learning rate. Source: PMS / MindSpore models' Pangu_alpha configurations.
LEARNING_RATES = {
    "tiny": (1e-3, 1e-4),
    "350m": (1e-4, 1e-6),
    "1.3b": (1e-4, 1e-6),
    "2.6b": (1e-4, 1e-6),
    "13b": (5e-5, 1e-6),
    "200b": (6e-5, 6e-6),
    # Not published for openPangu-Embedded: rates that models of their sizes are trained with.
    "embedded_tiny": (1e-3, 1e-4),
    "embedded_1b": (3e-4, 3e-5),
    "embedded_7b": (3e-4, 3e-5),
    "ultra_moe_tiny": (1e-3, 1e-4),
    "ultra_moe_718b": (2e-4, 2e-5),  # not published
    "2_tiny": (1e-3, 1e-4),
    "2_flash": (2e-4, 2e-5),  # not published
    "2_pro": (2e-4, 2e-5),  # not published
    "ultra_135b": (1e-4, 1e-5),  # arXiv:2504.07866
    "pro_moe_tiny": (1e-3, 1e-4),
    "pro_moe_72b": (3e-4, 3e-5),
    "switch_tiny": (1e-3, 1e-4),
    "gshard_tiny": (1e-3, 1e-4),
    "sigma_tiny": (1e-3, 1e-4),
    "switch_2.6b": (1e-4, 1e-6),
    "gshard_13b": (5e-5, 1e-6),
    "sigma_1t": (5e-5, 1e-6),
}
