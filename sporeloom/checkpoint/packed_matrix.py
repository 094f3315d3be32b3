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

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.quantization_config import INSTEAD, KEY, Quantization
from sporeloom.checkpoint.quantized_matrix import Grouped, QuantizedMatrix, stored_numbers, unpacked
from sporeloom.checkpoint.tensor_files import StoredTensor, read_float32
from sporeloom.core.errors import ConfigError

PARTS = ("qweight", "qzeros", "scales", "g_idx")
IN_WORD = 8
"""4-bit numbers in an int32."""
EACH_ONE = np.uint32(0x11111111)
"""1 in each of them."""
TWO_FULL = np.uint32(0xFF000000)
"""15 in the last two of them."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class PackedMatrix(QuantizedMatrix):
    """A matrix of GPTQ or AWQ."""

    name: str
    quantization: Quantization
    parts: Mapping[str, StoredTensor]
    bits: int = 4

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        first, second = self.parts["qweight"].shape
        return (second, first * IN_WORD) if self.quantization.method == "gptq" else (second * IN_WORD, first)

    @property
    def num_groups(self) -> int:
        return self.parts["scales"].shape[0]

    @property
    def size(self) -> int:
        return self.quantization.group_size if self.quantization.group_size > 0 else self.shape[1]

    @property
    def order(self) -> StoredTensor | None:
        return self.parts.get("g_idx")

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

    def numbers(self) -> tuple[Grouped, NDArray[np.int64]]:
        scale = read_float32(self.parts["scales"]).T
        order = None if self.quantization.method == "gptq" else np.argsort(AWQ_ORDER)
        zero = unpacked(self._zero_words(), 4, order).T
        words = stored_numbers(self.parts["qweight"])
        q = unpacked(words.T, 4) if self.quantization.method == "gptq" else unpacked(words, 4, order).T
        return Grouped(q, np.ascontiguousarray(scale), np.ascontiguousarray(zero)), self.groups()

    def _zero_words(self) -> NDArray[np.int32]:
        """`qzeros` as the second version of GPTQ has them, and AWQ.

        Raises:
            ConfigError: zero points that were lost when they were packed.
        """
        words: NDArray[np.int32] = stored_numbers(self.parts["qzeros"])
        if not self.quantization.is_first:
            return words
        unsigned = words.view(np.uint32)
        if not self.quantization.by_gptqmodel and (unsigned >= TWO_FULL).any():
            raise ConfigError(
                f"{self.name}.qzeros: a zero point of 0 that AutoGPTQ wrote over those of the next rows, which are lost "
                f"(GPTQModel keeps them, and {KEY}.meta.quantizer names it); {INSTEAD}"
            )
        return (unsigned + EACH_ONE).view(np.int32)


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
