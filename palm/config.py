# SPDX-License-Identifier: Apache-2.0
"""The sizes PaLM was trained in, and a scaled-down one for laptops."""

import math
from typing import Any

from sporeloom.models.config import ModelConfig

PALM: dict[str, Any] = {
    "num_kv_heads": 1,
    "block": "parallel",
    "position": "rotary",
    "activation": "silu",
    "gated_mlp": True,
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "query_layer": False,
    "dropout_rate": 0.0,
}
"""Parts of every PaLM. Source: arXiv:2204.02311 section 2."""


def _palm(hidden_size: int, num_layers: int, num_heads: int, **more: Any) -> ModelConfig:
    """Configuration that all sizes share. Source: arXiv:2204.02311 sections 2 and 5, table 1.

    Matrices start with the variance of their input's width; those of a layer have the hidden size as input, or, the last
    two, a width close to it, and take one number here. The token embedding starts with variance 1.
    """
    values: dict[str, Any] = {
        "vocab_size": 256000,
        "head_dim": 256,
        "ffn_hidden_size": 4 * hidden_size,
        "seq_len": 2048,
        "logits_scale": 1 / math.sqrt(hidden_size),
        "z_loss": 1e-4,
        "eod_id": 1,
        "loss_ignore_id": 1,
        "embedding_init_std": 1.0,
        "qkv_init_std": 1 / math.sqrt(hidden_size),
        "init_std": 1 / math.sqrt(hidden_size),
        "output_init_std": 1 / math.sqrt(4 * hidden_size),
    }
    return ModelConfig(
        hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads, **{**PALM, **values, **more}
    )


# Parameter counts as published: 8b 8.63 B, 62b 62.50 B, 540b 540.35 B.
SIZES = {
    "tiny": _palm(128, 4, 4, vocab_size=2048, head_dim=32, seq_len=128),
    "8b": _palm(4096, 32, 16),
    "62b": _palm(8192, 64, 32),
    "540b": _palm(18432, 118, 48),
}

# Maximum and minimum learning rate. Source: arXiv:2204.02311 section 5; Adafactor's, 1e-2 for 10,000 steps, then
# 1 / sqrt(step). The tiny one's is for Adam.
LEARNING_RATES = {"tiny": (1e-3, 1e-4), "8b": (1e-2, 1e-3), "62b": (1e-2, 1e-3), "540b": (1e-2, 1e-3)}
