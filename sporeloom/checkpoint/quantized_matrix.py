# SPDX-License-Identifier: Apache-2.0
"""A matrix of a published folder whose numbers are unsigned integers, with a scale and a zero point for each group of
columns, whatever tensors they are packed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.tensor_files import StoredTensor, numpy_dtype
from sporeloom.core.errors import ConfigError
from sporeloom.models.weight_formats import OTHERWISE


class Grouped(NamedTuple):
    """A matrix of groups: w = (q - zero) * scale."""

    q: NDArray[np.uint8]
    """(..., out, in): 0 to 15, with 8 bits 0 to 255."""
    scale: NDArray[np.float32]
    """(..., out, groups)."""
    zero: NDArray[np.uint8]
    """(..., out, groups), as `q`."""


class Int8(NamedTuple):
    """A matrix of int8: w = q * scale."""

    q: NDArray[np.int8]
    """(..., out, in)."""
    scale: NDArray[np.float32]
    """(..., out)."""


class QuantizedMatrix(ABC):
    """A matrix that is read on demand."""

    name: str
    bits: int

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    @abstractmethod
    def num_groups(self) -> int:
        """Number of groups of a row."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Columns of a group, as the folder gives it."""

    @property
    @abstractmethod
    def order(self) -> StoredTensor | None:
        """The tensor with the group of each column, if there is one."""

    @abstractmethod
    def numbers(self) -> tuple[Grouped, NDArray[np.int64]]:
        """The matrix, and the group of each column.

        Raises:
            ConfigError: a part cannot be read, scales that are not finite, groups that are not there.
        """

    def groups(self) -> NDArray[np.int64]:
        """The group of each column.

        Raises:
            ConfigError: the tensor of groups cannot be read, or has groups that are not there.
        """
        columns = self.shape[1]
        groups = stored_numbers(self.order).astype(np.int64) if self.order else np.zeros(columns, np.int64)
        if not groups.any() or (groups == -1).all():
            return np.arange(columns) // self.size
        if groups.min() < 0 or groups.max() >= self.num_groups:
            assert self.order
            raise ConfigError(f"{self.order.name}: groups {groups.min()} .. {groups.max()} of {self.num_groups}")
        return groups

    def int4_problem(self) -> str | None:
        """Why int4 cannot take it as it is, which has groups of neighbours, all of one size.

        Raises:
            ConfigError: like `groups`.
        """
        columns = self.shape[1]
        if columns % self.num_groups or (columns > self.size and columns % self.size):
            return f"{self.name}: groups of {self.size} do not divide its {columns} columns, as int4 needs; {OTHERWISE}"
        if not np.array_equal(self.groups(), np.arange(columns) // (columns // self.num_groups)):
            order = self.order.name if self.order else self.name
            return f"{order}: columns of a group are not neighbours (desc_act), which int4 needs; {OTHERWISE}"
        return None

    def dequantized(self) -> NDArray[np.float32]:
        """The matrix in float32, exact but for the last rounding."""
        matrix, groups = self.numbers()
        whole = matrix.q.astype(np.float32) - matrix.zero.astype(np.float32)[:, groups]
        return whole * matrix.scale[:, groups]

    def int4(self) -> Grouped:
        """The matrix as it is.

        Raises:
            ConfigError: groups of columns that are not neighbours or not of one size.
        """
        if problem := self.int4_problem():
            raise ConfigError(problem)
        return self.numbers()[0]

    def int8(self) -> Int8 | None:
        """The matrix as it is; None: it has no int8 with a scale for each row."""
        if self.bits != 8 or self.num_groups > 1:
            return None
        matrix, _ = self.numbers()
        if (matrix.zero != 128).any():
            return None
        return Int8((matrix.q ^ 128).view(np.int8), matrix.scale[:, 0])


def stored_numbers(tensor: StoredTensor) -> NDArray[Any]:
    """All numbers of a tensor, of any type.

    Raises:
        ConfigError: they cannot be read.
    """
    try:
        found = np.fromfile(tensor.path, numpy_dtype(tensor.dtype), int(np.prod(tensor.shape)), offset=tensor.offset)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tensor.path}: cannot be read: {error}") from None
    return found.reshape(tensor.shape)


def unpacked(words: NDArray[np.int32], bits: int, order: NDArray[np.int64] | None = None) -> NDArray[np.uint8]:
    """Numbers of int32s (N, M) -> (N, 32 / bits * M), from the lowest bits on, or in another order."""
    order = np.arange(32 // bits) if order is None else order
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    numbers = (unsigned[..., None] >> (bits * order).astype(np.uint32)) & np.uint32(2**bits - 1)
    return numbers.astype(np.uint8).reshape(words.shape[0], -1)
