# SPDX-License-Identifier: Apache-2.0
"""Quantization of weights: matrices and the token embedding as int8 with one float32 scale for each output channel, or
matrices as int4 with a scale, and maybe a zero point, for each group of columns; rounded to the nearest."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.model_folder import Read
from sporeloom.checkpoint.quantized_matrix import Grouped, Int8
from sporeloom.core.errors import ConfigError
from sporeloom.models.weight_formats import BLOCK, WeightFormat
from sporeloom.nn.decoder import Decoder
from sporeloom.nn.head import Head
from sporeloom.nn.int4 import Int4ExpertLinear, Int4Linear
from sporeloom.nn.int8 import Int8Embedding, Int8ExpertLinear, Int8Head, Int8Linear, Int8TiedHead
from sporeloom.nn.linear import Linear
from sporeloom.nn.moe import ExpertLinear
from sporeloom.nn.replace import replace_cell
from sporeloom.nn.w8a8 import W8A8ExpertLinear, W8A8Linear
from sporeloom.strategy.tensor_slice import TensorSlice

MIN_INT4, MAX_INT4 = -8, 7
"""Range of int4."""


def quantize(net: Decoder, weights: WeightFormat) -> None:
    """Replace the parts of `net` that have matrices by those of the format."""
    for path, cell in list(net.cells_and_names()):
        if isinstance(cell, Linear):
            in_int8 = W8A8Linear if weights.is_w8a8(path) else Int8Linear
            replace_cell(net, path, Int4Linear(cell, weights) if weights.is_int4(path) else in_int8(cell))
        elif isinstance(cell, ExpertLinear):
            in_int8 = W8A8ExpertLinear if weights.is_w8a8(path) else Int8ExpertLinear
            replace_cell(net, path, Int4ExpertLinear(cell, weights) if weights.is_int4(path) else in_int8(cell))
    word = Int8Embedding(net.embedding.word)
    replace_cell(net, "head", Int8Head(net.head) if isinstance(net.head, Head) else Int8TiedHead(net.head, word))
    replace_cell(net, "embedding.word", word)  # last: its scale keeps the embedding's name


def narrow_matrices(net: Decoder) -> None:
    """Hold matrices in the number type that they are multiplied in, to which each step would round them again: the same
    numbers, and a step reads 2 bytes of each in place of 8."""
    for _, cell in net.cells_and_names():
        if type(cell) in (Linear, ExpertLinear, Head):
            cell.weight.set_dtype(cell.dtype)


def int4_of(exact: NDArray[np.float32], weights: WeightFormat) -> Grouped:
    """Round a matrix (..., out, in) to the nearest int4.

    Symmetric: the number of a group that is furthest from 0 becomes -8. Asymmetric: the least and the largest number become
    0 and 15, with 0 among them and exact.
    """
    groups = exact.reshape(*exact.shape[:-1], weights.groups(exact.shape[-1]), -1)
    if weights.has_zeros:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = _usable((high - low) / np.float32(15))
        zero = np.rint(-low / scale)
    else:
        furthest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
        scale = _usable(furthest / np.float32(MIN_INT4))
        zero = np.full(scale.shape, -MIN_INT4, np.float32)
    q = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], 0, MAX_INT4 - MIN_INT4)
    return Grouped(q.reshape(exact.shape).astype(np.uint8), scale, zero.astype(np.uint8))


def _usable(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales by which numbers can be divided: 1 for a group of zeros."""
    return np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale).astype(np.float32)


def packed(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes of int4 numbers (..., in) -> (..., in/32, 16)."""
    halves = q.reshape(*q.shape[:-1], -1, 2, BLOCK // 2)
    return np.bitwise_or(halves[..., 0, :], halves[..., 1, :] << 4, dtype=np.uint8)


def dequantized(matrix: Grouped) -> NDArray[np.float32]:
    """The numbers that a matrix in int4 stands for."""
    q, zero = matrix.q.astype(np.float32), matrix.zero.astype(np.float32)
    by_group = q.reshape(*zero.shape, -1) - zero[..., None]
    return (by_group * matrix.scale[..., None]).reshape(q.shape)


def quantized_weights(
    net: Decoder,
    read: Read,
    weights: WeightFormat,
    read_int4: Callable[[str], Grouped] | None = None,
    read_int8: Callable[[str], Int8 | None] | None = None,
) -> Read:
    """The function that reads a checkpoint for a quantized `net`: one of floating-point numbers, or of matrices that
    `read_int4` and, where it finds one, `read_int8` read by the names of their parameters.

    It raises ConfigError where a matrix's numbers, scales or zero points are not as many as the net's."""
    kinds: dict[str, type] = {
        path: type(cell)
        for path, cell in net.cells_and_names()
        if isinstance(cell, Int8Linear | Int8ExpertLinear | Int8Embedding | Int8Head | Int4Linear | Int4ExpertLinear)
    }
    shapes = {parameter.name: parameter.shape for parameter in net.get_parameters()}

    @lru_cache(1)  # a matrix and its scale are read one after the other
    def quantized(path: str) -> dict[str, NDArray[Any]]:
        name, scales = f"{path}.weight", shapes[f"{path}.scale"]
        if kinds[path] not in (Int4Linear, Int4ExpertLinear):
            if read_int8 and (as_is := read_int8(name)):
                return {"weight": as_is.q, "scale": as_is.scale.reshape(scales)}
            return _int8_of(np.asarray(read(name, TensorSlice.full(shapes[name])), np.float32), scales)
        *outer, blocks, half = shapes[name]
        if read_int4:
            matrix = read_int4(name)
        else:
            full = TensorSlice.full((*outer, blocks * half * 2))
            matrix = int4_of(np.asarray(read(name, full), np.float32), weights)
        found: dict[str, NDArray[Any]] = {"weight": packed(matrix.q), "scale": matrix.scale, "zero": matrix.zero}
        for kind, array in found.items():  # a slice of an array that is too large would be another one's numbers
            if array.shape != (wanted := tuple(shapes.get(f"{path}.{kind}", array.shape))):
                raise ConfigError(f"{path}.{kind}: the checkpoint's is {array.shape} in int4, the model's {wanted}")
        return found

    def read_part(name: str, part: TensorSlice) -> NDArray[Any]:
        path, _, kind = name.rpartition(".")
        if path not in kinds or kind not in ("weight", "scale", "zero"):
            return read(name, part)
        return quantized(path)[kind][part.slices]

    return read_part


def _int8_of(exact: NDArray[np.float32], scales: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    scale = np.maximum(np.abs(exact).max(-1, keepdims=True), np.finfo(np.float32).tiny) / 127
    return {"weight": np.rint(exact / scale).astype(np.int8), "scale": scale.reshape(scales).astype(np.float32)}
