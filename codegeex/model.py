# SPDX-License-Identifier: Apache-2.0
"""CodeGeeX on one device: PanGu-alpha's architecture (see mindloom/nn/decoder.py) with FastGelu.

Source: THUDM/CodeGeeX codegeex/torch/codegeex_model.py and codegeex/mindspore/src/pangu_alpha.py.
"""

from mindloom.nn.decoder import Decoder, DecoderWithLoss


class CodeGeeX(Decoder):
    """Tokens (B, T) and positions (B, T) -> logits (B*T, V)."""


class CodeGeeXWithLoss(DecoderWithLoss):
    """tokens, labels, positions, loss_weights, each (B, T) -> the loss."""

    def __init__(self, config):
        super().__init__(CodeGeeX(config))


Model, ModelWithLoss = CodeGeeX, CodeGeeXWithLoss  # the names every family's model.py has
