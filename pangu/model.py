# SPDX-License-Identifier: Apache-2.0
"""The PanGu models on one device.

PanGu-alpha. Source: pcl_pangu 1.2.6.2, panguAlpha_mindspore/src/pangu_alpha.py and panguAlpha_pytorch/megatron/model.

    x = word[tokens] + position[positions]
    N-1 times:  x += attention(norm(x));  x += mlp(norm(x))
    x = final_norm(x)
    top query layer:  x += attention(query=query_embedding[positions], key=value=norm(x));  x += mlp(norm(x))
    logits = x word^T

openPangu-Embedded and Pangu Ultra: N equal layers with RMSNorm, grouped keys and values, RoPE and SwiGLU; Ultra's each
between two norms. Source: openPangu-Embedded-7B-V1.1 modular_openpangu_dense.py; arXiv:2504.07866.
"""

from sporeloom.nn.decoder import DecoderWithLoss
from sporeloom.nn.query_layer import decoder_of


class PanGuWithLoss(DecoderWithLoss):
    """tokens, labels, positions, loss_weights, each (B, T) -> the loss."""

    def __init__(self, config, loss=None):
        super().__init__(decoder_of(config), loss)


Model, ModelWithLoss = decoder_of, PanGuWithLoss  # the names every family's model.py has
