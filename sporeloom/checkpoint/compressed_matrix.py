# SPDX-License-Identifier: Apache-2.0
"""Matrices of int8 and int4 as compressed-tensors publishes them.

- `pack-quantized`: `weight_packed` (out, in * bits / 32, rounded up) of int32 has columns i, i+1, ... from the lowest bits
  on, each larger by 2^(bits-1) so that it is not negative; `weight_shape` is (out, in). `weight_zero_point`, where groups
  have one, is (out * bits / 32, groups) of int32, rows likewise, or (out, groups) of int8.
- `int-quantized` and `naive-quantized`: `weight` (out, in) of int8, `weight_zero_point` of int8.
- Both: `weight_scale` (out, groups), (out, 1) or one number, and w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g], with g the
  group of column i: that of its neighbours, or `weight_g_idx` (in,), if that is not -1 everywhere.

Source: `pack_to_int32` and the compressors of compressed-tensors (github.com/vllm-project/compressed-tensors,
src/compressed_tensors/compressors), `dequantize` (quantization/lifecycle/forward.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.compressed_schemes import Scheme
from sporeloom.checkpoint.quantized_matrix import Grouped, QuantizedMatrix, stored_numbers, unpacked
from sporeloom.checkpoint.tensor_files import StoredTensor, read_float32
from sporeloom.core.errors import ConfigError

PACKED, PLAIN = "weight_packed", "weight"
BESIDE = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")


@dataclass(frozen=True)
class CompressedMatrix(QuantizedMatrix):
    """A matrix of compressed-tensors."""

    name: str
    parts: Mapping[str, StoredTensor]
    rows: int
    columns: int
    scheme: Scheme
    bits: int
    """Bits of a number as it is stored."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def num_groups(self) -> int:
        return self.scheme.num_groups(self.columns)

    @property
    def size(self) -> int:
        return self.scheme.group_size if self.scheme.group_size > 0 else self.columns

    @property
    def order(self) -> StoredTensor | None:
        return self.parts.get("weight_g_idx")

    def numbers(self) -> tuple[Grouped, NDArray[np.int64]]:
        if PACKED in self.parts:
            q = unpacked(stored_numbers(self.parts[PACKED]), self.bits)[:, : self.columns]
        else:
            q = np.bitwise_xor(stored_numbers(self.parts[PLAIN]).view(np.uint8), 128, dtype=np.uint8)
        wide = self.rows, self.num_groups
        scale = np.broadcast_to(_by_group(read_float32(self.parts["weight_scale"])), wide)
        zero = np.broadcast_to(self._zero(), wide)
        return Grouped(q, np.ascontiguousarray(scale), np.ascontiguousarray(zero)), self.groups()

    def _zero(self) -> NDArray[np.uint8]:
        """Zero points, as far as they are stored, larger by what numbers are."""
        half = 2 ** (self.bits - 1)
        if "weight_zero_point" not in self.parts:
            return np.full((1, 1), half, np.uint8)
        stored = stored_numbers(self.parts["weight_zero_point"])
        if stored.dtype == np.int32:
            return unpacked(stored.T, self.bits)[:, : self.rows].T
        zero = _by_group(stored).astype(np.int64) + half
        if zero.min() < 0 or zero.max() >= 2 * half:
            raise ConfigError(
                f"{self.name}.weight_zero_point: {zero.min() - half} .. {zero.max() - half} are not of {self.bits} bits"
            )
        return zero.astype(np.uint8)


def _by_group(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """One number, or one of each row, as a matrix."""
    return array.reshape(len(array) if array.ndim else 1, -1)


def compressed_matrices(tensors: Mapping[str, StoredTensor], schemes: Sequence[Scheme]) -> dict[str, CompressedMatrix]:
    """The matrices among published tensors, by the name of the module.

    Raises:
        ConfigError: parts of one that are missing, do not go together, or are of no scheme.
    """
    found = {}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        if part == PACKED or (part == PLAIN and tensor.dtype == "int8"):
            parts = {part: tensors[f"{base}.{part}"] for part in (part, *BESIDE) if f"{base}.{part}" in tensors}
            found[base] = _matrix(base, parts, schemes)
    return found


def _matrix(base: str, parts: Mapping[str, StoredTensor], schemes: Sequence[Scheme]) -> CompressedMatrix:
    kind = PACKED if PACKED in parts else PLAIN
    needed = ("weight_scale", "weight_shape") if kind == PACKED else ("weight_scale",)
    if missing := [part for part in needed if part not in parts]:
        raise ConfigError(f"{base}.{kind} is there, but {base}.{missing[0]} is missing")
    if kind == PACKED and parts[kind].dtype != "int32":
        raise ConfigError(f"{base}.{kind} is {parts[kind].dtype}; numbers are packed into int32")
    shape = stored_numbers(parts["weight_shape"]).tolist() if kind == PACKED else list(parts[kind].shape)
    if len(shape) != 2 or len(parts[kind].shape) != 2 or min(shape) < 1:
        raise ConfigError(f"{base}.{kind} is {parts[kind].shape} of {shape}; it must be a matrix")
    for scheme in schemes:
        bits = scheme.bits if kind == PACKED else 8
        matrix = CompressedMatrix(base, parts, shape[0], shape[1], scheme, bits)
        if _fits(matrix):
            return matrix
    said = {name: tensor.shape for name, tensor in parts.items()}
    raise ConfigError(
        f"{base}: {', '.join(f'{name} {shape}' for name, shape in said.items())} of {shape[0]} x {shape[1]} numbers are "
        f"not as config_groups say ({'; '.join(map(str, schemes))})"
    )


def _fits(matrix: CompressedMatrix) -> bool:
    """Whether the parts of a matrix have the shapes of its scheme."""
    parts, rows, columns, per_word = matrix.parts, matrix.rows, matrix.columns, 32 // matrix.bits
    groups, has_one = matrix.num_groups, matrix.scheme.group_size == 0
    by_group = {(1,), (), (1, 1)} if has_one else {(rows, groups), (rows,)} if groups == 1 else {(rows, groups)}
    zero = parts.get("weight_zero_point")
    if zero is None:
        has_zeros = not matrix.scheme.has_zeros
    elif zero.dtype == "int32":
        has_zeros = PACKED in parts and zero.shape == (-(-rows // per_word), groups)
    else:
        has_zeros = zero.dtype == "int8" and zero.shape in by_group
    order = parts.get("weight_g_idx")
    return (
        (PACKED not in parts or parts[PACKED].shape == (rows, -(-columns // per_word)))
        and parts["weight_scale"].shape in by_group
        and has_zeros
        and (order is None or (order.dtype in ("int32", "int64") and order.shape == (columns,)))
    )
