# SPDX-License-Identifier: Apache-2.0
"""The caches of a network as memory: what rows hold is read, written and overwritten, on every rank its own part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from sporeloom.inference.model import CACHE
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.program import storage

CONVOLUTION = "_conv.cache."
"""Part of the names of caches of convolutions."""


class SlotMemory:
    """Keys and values of the rows that this rank holds: (rows, heads, slots, width) in each cache.

    On a CPU a parameter's array is the memory that graphs compute with; elsewhere it is copied.

    Args:
        within: first part of the names of the caches; empty: all caches.
    """

    def __init__(self, engine: Engine, net: nn.Cell, within: str = ""):
        self._engine, self._net, self._within = engine, net, within
        self._on_cpu = engine.target == "CPU"

    def held(self, row: int) -> list[tuple[Parameter, int]]:
        """The caches that hold a row here, and its place in each."""
        return [(cache, row - rows.start) for cache, rows in self._caches if rows.start <= row < rows.stop]

    @cached_property
    def _caches(self) -> list[tuple[Parameter, slice]]:
        """The caches of which this rank holds a part, and its rows; known once a graph is compiled."""
        found = []
        for parameter in self._net.get_parameters():
            if CACHE in parameter.name and parameter.name.startswith(self._within):
                shape = self._net.parallel_report.of(parameter.name).global_shape
                if held := self._engine.held_slice(parameter.name, shape):
                    # Where no kernel computes in its own type, programs have another.
                    found.append((storage(parameter), slice(held.start[0], held.stop[0])))
        return found

    def clear(self, row: int, start: int) -> None:
        """Overwrite slots of a row from `start` on with zeros."""
        for parameter, place in self.held(row):
            slots = self._slots_from(parameter, start)
            if self._on_cpu:
                parameter.asnumpy()[place, :, slots] = 0
            else:
                values = parameter.asnumpy().copy()
                values[place, :, slots] = 0
                parameter.set_data(Tensor(values, dtype=parameter.dtype), slice_shape=parameter.sliced)

    def _slots_from(self, parameter: Parameter, start: int) -> NDArray[np.int64]:
        """Slots of a cache from `start` on; of a convolution the cells without the tokens that it still reads."""
        count = parameter.shape[2]
        if CONVOLUTION not in parameter.name:
            return np.arange(start, count)
        read = range(max(0, start + 1 - self._net.config.latent.conv_width), start)
        return np.asarray(
            [cell for cell in range(count) if cell not in {slot % (count - 1) for slot in read}], np.int64
        )

    def read(self, row: int, start: int, stop: int) -> list[NDArray[Any]]:
        """Copy slots of a row."""
        found = []
        for parameter, place in self.held(row):
            if self._on_cpu:
                found.append(parameter.asnumpy()[place, :, start:stop].copy())
            else:
                found.append(parameter[place : place + 1, :, start:stop].asnumpy()[0])
        return found

    def write(self, row: int, start: int, values: Sequence[NDArray[Any]]) -> None:
        """Write what `read` returned to slots of a row."""
        for (parameter, place), value in zip(self.held(row), values, strict=True):
            if self._on_cpu:
                parameter.asnumpy()[place, :, start : start + value.shape[1]] = value
            else:
                heads, count, _ = value.shape
                where = np.stack(
                    np.broadcast_arrays(place, np.arange(heads)[:, None], np.arange(start, start + count)), -1
                )
                ops.ScatterNdUpdate()(parameter, Tensor(where.astype(np.int32)), Tensor(value, dtype=parameter.dtype))
