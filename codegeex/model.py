# SPDX-License-Identifier: Apache-2.0
"""The CodeGeeX models on one device.

CodeGeeX (2022): PanGu-alpha's architecture (see sporeloom/nn/query_layer.py) with FastGelu. Source: THUDM/CodeGeeX
codegeex/torch/codegeex_model.py and codegeex/mindspore/src/pangu_alpha.py.

CodeGeeX2 and CodeGeeX4: ChatGLM2's and GLM-4's, with two heads of keys and values and RoPE on half of each head. Source:
THUDM/codegeex2-6b modeling_chatglm.py, THUDM/codegeex4-all-9b config.json.
"""

from sporeloom.nn.decoder import DecoderWithLoss
from sporeloom.nn.query_layer import decoder_of


class CodeGeeXWithLoss(DecoderWithLoss):
    """tokens, labels, positions, loss_weights, each (B, T) -> the loss."""

    def __init__(self, config, loss=None):
        super().__init__(decoder_of(config), loss)


Model, ModelWithLoss = decoder_of, CodeGeeXWithLoss  # the names every family's model.py has
