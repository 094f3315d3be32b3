# SPDX-License-Identifier: Apache-2.0
"""Matrices of 4 bits as GPTQ and AWQ publish them: `qweight`, `qzeros`, `scales` and, of GPTQ, `g_idx`, of int32 and float16.

A matrix (out, in) is w[o, i] = (q[o, i] - zero[g, o]) * scale[g, o] with g the group of column i. An int32 has 8 numbers:

- GPTQ: `qweight` (in/8, out) has columns i, i+1, ... from the lowest bits on, `qzeros` (groups, out/8) rows likewise, as they
  are in gptq_v2. `g_idx` (in,) is the group of each column, in any order after `desc_act`; without it, or where it is all
  zeros, groups follow each other.
- GPTQ's first version (`checkpoint_format` gptq): each zero point is less 1. GPTQModel subtracts 0x11111111 from the whole
  int32, so that a 0 borrows from the next row; adding it back is exact. AutoGPTQ subtracts from each number and combines the
  results with "or": -1 of a 0 fills all rows after it, in that int32, with 15, and they are lost. Without a zero point of 0
  both write the same. 15 in the last row alone is a 0 of either. 15 in the last two is read where GPTQModel says that it
  wrote the folder, and refused otherwise.
- AWQ, version gemm: `qweight` (in, out/8) and `qzeros` (groups, out/8) have rows 0, 2, 4, 6, 1, 3, 5, 7 of each 8 from the
  lowest bits on.

Source: QuantLinear of AutoGPTQ (github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda.py),
`convert_gptq_v1_to_v2_format` of GPTQModel (github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py), WQLinear_GEMM of
AutoAWQ (github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.quantization_config import INSTEAD, KEY, Quantization
from sporeloom.checkpoint.tensor_files import StoredTensor, read_float32
from sporeloom.core.errors import ConfigError
from sporeloom.models.weight_formats import OTHERWISE

PARTS = ("qweight", "qzeros", "scales", "g_idx")
IN_WORD = 8
"""4-bit numbers in an int32."""
EACH_ONE = np.uint32(0x11111111)
"""1 in each of them."""
TWO_FULL = np.uint32(0xFF000000)
"""15 in the last two of them."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Int4(NamedTuple):
    """A matrix in int4: w = (q - zero) * scale."""

    q: NDArray[np.uint8]
    """(..., out, in), 0 to 15."""
    scale: NDArray[np.float32]
    """(..., out, groups)."""
    zero: NDArray[np.uint8]
    """(..., out, groups), 0 to 15."""


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of a published folder, read on demand."""

    name: str
    quantization: Quantization
    parts: Mapping[str, StoredTensor]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        first, second = self.parts["qweight"].shape
        return (second, first * IN_WORD) if self.quantization.method == "gptq" else (second * IN_WORD, first)

    @property
    def num_groups(self) -> int:
        return self.parts["scales"].shape[0]

    def check(self) -> None:
        """Check the shapes and types of its parts.

        Raises:
            ConfigError: one is missing, or not what the others say.
        """
        if missing := [part for part in PARTS[:3] if part not in self.parts]:
            raise ConfigError(f"{self.name}.qweight is there, but {self.name}.{missing[0]} is missing")
        out, columns = self.shape if len(self.parts["qweight"].shape) == 2 else (0, 0)
        size = self.quantization.group_size if self.quantization.group_size > 0 else max(columns, 1)
        groups = -(-columns // size)
        wanted = {"qzeros": (groups, out // IN_WORD), "scales": (groups, out), "g_idx": (columns,)}
        problems = [
            f"{tensor.name} is {tensor.shape}; with qweight {self.parts['qweight'].shape} and group_size "
            f"{self.quantization.group_size} it is {wanted[part]}"
            for part, tensor in self.parts.items()
            if part in wanted and tensor.shape != wanted[part]
        ]
        problems += [
            f"{tensor.name} is {tensor.dtype}; 4-bit numbers are packed into int32"
            for part, tensor in self.parts.items()
            if part != "scales" and tensor.dtype != "int32"
        ]
        if not out or problems:
            raise ConfigError(
                problems or [f"{self.name}.qweight is {self.parts['qweight'].shape}; it must be a matrix"]
            )

    def numbers(self) -> tuple[Int4, NDArray[np.int64]]:
        """The matrix, and the group of each column.

        Raises:
            ConfigError: a part cannot be read, scales that are not finite, groups that are not there.
        """
        scale = read_float32(self.parts["scales"]).T
        zero = _unpacked(self._zero_words(), self.quantization.method).T
        words = _words(self.parts["qweight"])
        q = _unpacked(words.T, "gptq") if self.quantization.method == "gptq" else _unpacked(words, "awq").T
        return Int4(q, np.ascontiguousarray(scale), np.ascontiguousarray(zero)), self.groups()

    def _zero_words(self) -> NDArray[np.int32]:
        """`qzeros` as the second version of GPTQ has them, and AWQ.

        Raises:
            ConfigError: zero points that were lost when they were packed.
        """
        words = _words(self.parts["qzeros"])
        if not self.quantization.is_first:
            return words
        unsigned = words.view(np.uint32)
        if not self.quantization.by_gptqmodel and (unsigned >= TWO_FULL).any():
            raise ConfigError(
                f"{self.name}.qzeros: a zero point of 0 that AutoGPTQ wrote over those of the next rows, which are lost "
                f"(GPTQModel keeps them, and {KEY}.meta.quantizer names it); {INSTEAD}"
            )
        return (unsigned + EACH_ONE).view(np.int32)

    def groups(self) -> NDArray[np.int64]:
        """The group of each column.

        Raises:
            ConfigError: `g_idx` cannot be read, or has groups that are not there.
        """
        columns = self.shape[1]
        size = self.quantization.group_size if self.quantization.group_size > 0 else columns
        groups = _words(self.parts["g_idx"]).astype(np.int64) if "g_idx" in self.parts else np.zeros(columns, np.int64)
        if not groups.any():
            return np.arange(columns) // size
        if groups.min() < 0 or groups.max() >= self.num_groups:
            raise ConfigError(f"{self.name}.g_idx: groups {groups.min()} .. {groups.max()} of {self.num_groups}")
        return groups

    def int4_problem(self) -> str | None:
        """Why int4 cannot take it as it is, which has groups of neighbours, all of one size.

        Raises:
            ConfigError: like `groups`.
        """
        columns, size = self.shape[1], self.quantization.group_size
        if columns % self.num_groups or (size > 0 and columns > size and columns % size):
            return f"{self.name}: groups of {size} do not divide its {columns} columns, as int4 needs; {OTHERWISE}"
        if not np.array_equal(self.groups(), np.arange(columns) // (columns // self.num_groups)):
            return f"{self.name}.g_idx: columns of a group are not neighbours (desc_act), which int4 needs; {OTHERWISE}"
        return None

    def dequantized(self) -> NDArray[np.float32]:
        """The matrix in float32, exact but for the last rounding."""
        matrix, groups = self.numbers()
        whole = matrix.q.astype(np.float32) - matrix.zero.astype(np.float32)[:, groups]
        return whole * matrix.scale[:, groups]

    def int4(self) -> Int4:
        """The matrix as it is.

        Raises:
            ConfigError: groups of columns that are not neighbours or not of one size.
        """
        if problem := self.int4_problem():
            raise ConfigError(problem)
        return self.numbers()[0]


def _words(tensor: StoredTensor) -> NDArray[np.int32]:
    """All numbers of a tensor of int32."""
    try:
        found = np.fromfile(tensor.path, np.int32, int(np.prod(tensor.shape)), offset=tensor.offset)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tensor.path}: cannot be read: {error}") from None
    return found.reshape(tensor.shape)


def _unpacked(words: NDArray[np.int32], method: str) -> NDArray[np.uint8]:
    """Numbers of int32s (N, M) -> (N, 8 M)."""
    order = np.arange(IN_WORD) if method == "gptq" else np.argsort(AWQ_ORDER)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    numbers = (unsigned[..., None] >> (4 * order).astype(np.uint32)) & np.uint32(15)
    return numbers.astype(np.uint8).reshape(words.shape[0], -1)


def packed_matrices(tensors: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, PackedMatrix]:
    """The matrices among published tensors, by the name of the module.

    Raises:
        ConfigError: parts of one that are missing, or do not go together.
    """
    bases = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    found = {}
    for base in bases:
        parts = {part: tensors[f"{base}.{part}"] for part in PARTS if f"{base}.{part}" in tensors}
        found[base] = PackedMatrix(base, quantization, parts)
        found[base].check()
    return found
