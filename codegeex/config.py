# SPDX-License-Identifier: Apache-2.0
"""The size CodeGeeX was published in, and one for laptops. `num_layers` counts the top query layer."""

from mindloom.model_config import DecoderConfig

SIZES = {
    # For laptops and tests. Its tokenizer is trained on the data and has <|endoftext|> as its token 0.
    "tiny": DecoderConfig(
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
    # 12,873,943,040 parameters. The word table has (51200 // 1024 + 1) * 1024 rows for the tokenizer's 50400 ids.
    "13b": DecoderConfig(
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
}

# Learning rate at its highest and at the end. Source: THUDM/CodeGeeX codegeex/mindspore/configs/13B.sh.
LEARNING_RATES = {"tiny": (1e-3, 1e-4), "13b": (1e-4, 1e-6)}
