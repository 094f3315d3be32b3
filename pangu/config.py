# SPDX-License-Identifier: Apache-2.0
"""The sizes PanGu-alpha was published in. `num_layers` counts the top query layer."""

from mindloom.model_config import DecoderConfig

# Parameter counts as published: 350m 345,368,576; 2.6b 2,625,295,360; 13b 12,800,870,400; 200b 206,861,008,896.
SIZES = {
    # For laptops and tests. Without dropout every mesh computes exactly the same losses.
    "tiny": DecoderConfig(vocab_size=2048, hidden_size=128, num_layers=4, num_heads=4, seq_len=128, dropout_rate=0.0),
    "350m": DecoderConfig(vocab_size=40000, hidden_size=1024, num_layers=24, num_heads=16),
    "1.3b": DecoderConfig(vocab_size=40000, hidden_size=2560, num_layers=16, num_heads=32),
    "2.6b": DecoderConfig(vocab_size=40000, hidden_size=2560, num_layers=32, num_heads=32),
    "13b": DecoderConfig(vocab_size=40000, hidden_size=5120, num_layers=40, num_heads=40),
    "200b": DecoderConfig(vocab_size=40000, hidden_size=16384, num_layers=64, num_heads=128),
}

# Learning rate at its highest and at the end. Source: PMS / MindSpore models' Pangu_alpha configurations.
LEARNING_RATES = {
    "tiny": (1e-3, 1e-4),
    "350m": (1e-4, 1e-6),
    "1.3b": (1e-4, 1e-6),
    "2.6b": (1e-4, 1e-6),
    "13b": (5e-5, 1e-6),
    "200b": (6e-5, 6e-6),
}
