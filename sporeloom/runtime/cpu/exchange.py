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
from sporeloom.runtime.cpu.recorder import FlightRecorder
from sporeloom.runtime.cpu.transport import Array, Collectives, Transport


class TransportExchange:
    """Messages between CPU processes. Sums are NumPy arrays."""

    def __init__(
        self, transport: Transport, nan_finder: NanFinder | None = None, recorder: FlightRecorder | None = None
    ):
        self.transport, self.nan_finder, self.rank = transport, nan_finder, transport.rank
        self.recorder = recorder

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Do nothing: all processes are connected."""

    def send(self, peer: int, tag: tuple[str, Name, int], value: Tensor, type: TensorType) -> None:
        array = value.asnumpy()
        array = array.astype(ml_dtypes.bfloat16) if type.dtype == "bfloat16" else array
        self._record(False, (self.rank, peer, tag), f"Send of microbatch {tag[2]} to rank {peer}", array)
        self.transport.send(peer, tag, array)

    def receive(self, peer: int, tag: tuple[str, Name, int], type: TensorType) -> Tensor:
        def receive(_: Array) -> Array:
            array: Array = self.transport.receive(peer, tag)
            return array

        place = f"Receive of microbatch {tag[2]} from rank {peer}"
        array = self.transport.watched(place, receive)(np.zeros(0))
        self._record(True, (peer, self.rank, tag), place, array)
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

    def larger(self, total: Array | None, value: Tensor) -> Array:
        array: Array = value.asnumpy()
        return array.copy() if total is None else np.maximum(total, array)

    def sum_of(self, total: Array) -> Tensor:
        return Tensor(total)

    def join(self, values: Sequence[Tensor], dim: int) -> Tensor:
        return Tensor(np.concatenate([value.asnumpy() for value in values], dim))

    def broadcast(self, value: Array | None, type: TensorType, ranks: Sequence[int], source: int, tag: Any) -> Tensor:
        group = Collectives(self.transport, ranks, tag)
        given = np.zeros(0) if value is None else value
        result = group.broadcast(given, source)
        is_received, place = self.rank != ranks[source], f"Broadcast of rank {ranks[source]}"
        self._record(is_received, (tuple(ranks), tag), place, result)
        return Tensor(result)

    def _record(self, is_received: bool, tag: object, place: str, array: Array) -> None:
        if self.recorder:
            self.recorder.transfer(is_received, str(tag), place, array)
