# SPDX-License-Identifier: Apache-2.0
"""Values that pipeline stages exchange, between CPU processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from mindspore import Tensor

from sporeloom.partition.graph import Name, TensorType
from sporeloom.runtime.cpu.find_nan import NanFinder
from sporeloom.runtime.cpu.transport import Array, Collectives, Transport


class TransportExchange:
    """Messages between CPU processes. Sums are NumPy arrays."""

    def __init__(self, transport: Transport, nan_finder: NanFinder | None = None):
        self.transport, self.nan_finder, self.rank = transport, nan_finder, transport.rank

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Do nothing: all processes are connected."""

    def send(self, peer: int, tag: tuple[str, Name, int], value: Tensor, type: TensorType) -> None:
        array = value.asnumpy()
        self.transport.send(peer, tag, array.astype(ml_dtypes.bfloat16) if type.dtype == "bfloat16" else array)

    def receive(self, peer: int, tag: tuple[str, Name, int], type: TensorType) -> Tensor:
        def receive(_: Array) -> Array:
            array: Array = self.transport.receive(peer, tag)
            return array

        array = self.transport.watched(f"Receive of microbatch {tag[2]} from rank {peer}", receive)(np.zeros(0))
        array = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
        if self.nan_finder:
            self.nan_finder.receive(array)
        return Tensor(array)

    def settle(self) -> None:
        """Do nothing: sent values are copied at once."""

    def zeros(self, type: TensorType) -> Tensor:
        return Tensor(np.zeros(type.shape, np.float32 if type.dtype == "bfloat16" else type.dtype))

    def add(self, total: Array | None, value: Tensor) -> Array:
        array: Array = value.asnumpy()
        return array.copy() if total is None else total + array

    def sum_of(self, total: Array) -> Tensor:
        return Tensor(total)

    def join(self, values: Sequence[Tensor], dim: int) -> Tensor:
        return Tensor(np.concatenate([value.asnumpy() for value in values], dim))

    def broadcast(self, value: Array | None, type: TensorType, ranks: Sequence[int], source: int, tag: Any) -> Tensor:
        group = Collectives(self.transport, ranks, tag)
        return Tensor(group.broadcast(np.zeros(0) if value is None else value, source))
