# SPDX-License-Identifier: Apache-2.0
"""PaLM on one device.

    x = word[tokens]
    N times:  n = norm(x);  x += attention(n) + mlp(n)
    logits = norm(x) word^T / sqrt(D)

LayerNorm without bias, one head of keys and values, RoPE, SwiGLU, no biases. Source: arXiv:2204.02311 sections 2 and 5.
"""

from sporeloom.nn.decoder import DecoderWithLoss
from sporeloom.nn.query_layer import decoder_of


class PaLMWithLoss(DecoderWithLoss):
    """tokens, labels, positions, loss_weights, each (B, T) -> the loss."""

    def __init__(self, config, loss=None):
        super().__init__(decoder_of(config), loss)


Model, ModelWithLoss = decoder_of, PaLMWithLoss  # the names every family's model.py has
