# SPDX-License-Identifier: Apache-2.0
"""The sizes of CodeGeeX, CodeGeeX2 and CodeGeeX4, and scaled-down ones for laptops. The first one's layers count
its query layer."""

from typing import Any

from sporeloom.models.config import ModelConfig

GLM: dict[str, Any] = {
    "norm": "rms",
    "position": "rotary",
    "rope_pairs": "adjacent",
    "activation": "silu",
    "gated_mlp": True,
    "output_bias": False,
    "mlp_bias": False,
    "query_layer": False,
    "dropout_rate": 0.0,
    "qkv_init_std": 0.02,
    "output_init_std": 0.02,
}
"""Parts of CodeGeeX2 and 4. Source: config.json of THUDM/codegeex2-6b and THUDM/codegeex4-all-9b."""


def _glm(**values: Any) -> ModelConfig:
    shared: dict[str, Any] = {
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 2,
        "ffn_hidden_size": 13696,
        "rope_dim": 64,
        "tied_embedding": False,
    }
    return ModelConfig(**{**GLM, **shared, **values})


SIZES = {
    # For laptops and tests. Its tokenizer is trained on the data and has <|endoftext|> as its token 0.
    "tiny": ModelConfig(
        vocab_size=2048,
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        seq_len=128,
        activation="fast_gelu",
        dropout_rate=0.0,
        eod_id=0,
        loss_ignore_id=0,
        embedding_init_std=0.01,
    ),
    # 12,873,943,040 parameters. The embedding has (51200 // 1024 + 1) * 1024 rows for the tokenizer's 50400 ids.
    "13b": ModelConfig(
        vocab_size=52224,
        hidden_size=5120,
        num_layers=40,
        num_heads=40,
        seq_len=2048,
        activation="fast_gelu",
        eod_id=50256,
        loss_ignore_id=50256,
        embedding_init_std=0.01,
    ),
    # Every kind of part that the two below have; its tokenizer is CodeGeeX's.
    "4_tiny": _glm(
        vocab_size=2048,
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        ffn_hidden_size=384,
        rope_dim=16,
        seq_len=128,
        eod_id=0,
        loss_ignore_id=0,
    ),
    # 6,243,584,000 and 9,399,951,360 parameters.
    "2_6b": _glm(vocab_size=65024, num_layers=28, seq_len=8192, eod_id=2, loss_ignore_id=2),
    "4_9b": _glm(
        vocab_size=151552,
        num_layers=40,
        seq_len=131072,
        rope_theta=5e6,  # 10,000 times rope_ratio 500
        eod_id=151329,
        loss_ignore_id=151329,
        stop_ids=(151336, 151338),
    ),
}

# Maximum and minimum learning rate. Source: THUDM/CodeGeeX codegeex/mindspore/configs/13B.sh.
# Not published for CodeGeeX2 and 4: rates that models of their sizes are trained with.
LEARNING_RATES = {
    "tiny": (1e-3, 1e-4),
    "13b": (1e-4, 1e-6),
    "4_tiny": (1e-3, 1e-4),
    "2_6b": (3e-4, 3e-5),
    "4_9b": (3e-4, 3e-5),
}
