# SPDX-License-Identifier: Apache-2.0
"""PanGu-alpha on one device.

    x = word[tokens] + position[positions]
    N-1 times:  x += attention(norm(x));  x += mlp(norm(x))
    x = final_norm(x)
    top query layer:  x += attention(query=query_embedding[positions], key=value=norm(x));  x += mlp(norm(x))
    logits = x word^T

Source: pcl_pangu 1.2.6.2, panguAlpha_mindspore/src/pangu_alpha.py and panguAlpha_pytorch/megatron/model.
"""

from mindloom.nn.decoder import Decoder, DecoderWithLoss


class PanGu(Decoder):
    """Tokens (B, T) and positions (B, T) -> logits (B*T, V)."""


class PanGuWithLoss(DecoderWithLoss):
    """tokens, labels, positions, loss_weights, each (B, T) -> the loss."""

    def __init__(self, config):
        super().__init__(PanGu(config))


Model, ModelWithLoss = PanGu, PanGuWithLoss  # the names every family's model.py has
