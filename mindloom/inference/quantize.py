# SPDX-License-Identifier: Apache-2.0
"""Weight-only int8: every matrix and the word embedding as int8 with one float32 scale for each output channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindloom.nn.decoder import Decoder
from mindloom.nn.head import Head
from mindloom.nn.int8 import Int8Embedding, Int8ExpertLinear, Int8Head, Int8Linear, Int8TiedHead
from mindloom.nn.linear import Linear
from mindloom.nn.moe import ExpertLinear
from mindloom.nn.replace import replace_cell


def quantize(net: Decoder) -> None:
    """Replace the parts of `net` that have matrices by their int8 kind."""
    for path, cell in list(net.cells_and_names()):
        for kind, coarse in ((Linear, Int8Linear), (ExpertLinear, Int8ExpertLinear)):
            if isinstance(cell, kind):
                replace_cell(net, path, coarse(cell))
    word = Int8Embedding(net.embedding.word)
    replace_cell(net, "head", Int8Head(net.head) if isinstance(net.head, Head) else Int8TiedHead(net.head, word))
    replace_cell(net, "embedding.word", word)  # last: its scale keeps the embedding's name


def quantize_weights(net: Decoder, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The tensors of a float checkpoint as a quantized `net` wants them."""
    result = dict(weights)
    for path, cell in net.cells_and_names():
        if isinstance(cell, Int8Linear | Int8ExpertLinear | Int8Embedding | Int8Head):
            whole = np.asarray(result[f"{path}.weight"], np.float32)
            scale = np.maximum(np.abs(whole).max(-1, keepdims=True), np.finfo(np.float32).tiny) / 127
            result[f"{path}.weight"] = np.rint(whole / scale).astype(np.int8)
            result[f"{path}.scale"] = scale.reshape(cell.scale.shape).astype(np.float32)
    return result
