# SPDX-License-Identifier: Apache-2.0
"""Weight-only int8: every matrix and the token embedding as int8 with one float32 scale for each output channel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.model_folder import Read
from sporeloom.nn.decoder import Decoder
from sporeloom.nn.head import Head
from sporeloom.nn.int8 import Int8Embedding, Int8ExpertLinear, Int8Head, Int8Linear, Int8TiedHead
from sporeloom.nn.linear import Linear
from sporeloom.nn.moe import ExpertLinear
from sporeloom.nn.replace import replace_cell
from sporeloom.strategy.tensor_slice import TensorSlice


def quantize(net: Decoder) -> None:
    """Replace the parts of `net` that have matrices by their int8 kind."""
    for path, cell in list(net.cells_and_names()):
        for kind, coarse in ((Linear, Int8Linear), (ExpertLinear, Int8ExpertLinear)):
            if isinstance(cell, kind):
                replace_cell(net, path, coarse(cell))
    word = Int8Embedding(net.embedding.word)
    replace_cell(net, "head", Int8Head(net.head) if isinstance(net.head, Head) else Int8TiedHead(net.head, word))
    replace_cell(net, "embedding.word", word)  # last: its scale keeps the embedding's name


def quantized_weights(net: Decoder, read: Read) -> Read:
    """The function that reads a float checkpoint for a quantized `net`."""
    coarse = {
        f"{path}.{kind}": (path, kind)
        for path, cell in net.cells_and_names()
        if isinstance(cell, Int8Linear | Int8ExpertLinear | Int8Embedding | Int8Head)
        for kind in ("weight", "scale")
    }
    shapes = {parameter.name: parameter.shape for parameter in net.get_parameters()}

    @lru_cache(1)  # a matrix and its scale are read one after the other
    def quantized(path: str) -> dict[str, NDArray[Any]]:
        name = f"{path}.weight"
        exact = np.asarray(read(name, TensorSlice.full(shapes[name])), np.float32)
        scale = np.maximum(np.abs(exact).max(-1, keepdims=True), np.finfo(np.float32).tiny) / 127
        scales = scale.reshape(shapes[f"{path}.scale"]).astype(np.float32)
        return {"weight": np.rint(exact / scale).astype(np.int8), "scale": scales}

    def read_part(name: str, part: TensorSlice) -> NDArray[Any]:
        if name not in coarse:
            return read(name, part)
        path, kind = coarse[name]
        return quantized(path)[kind][part.slices]

    return read_part
