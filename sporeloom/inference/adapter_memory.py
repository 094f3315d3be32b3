# SPDX-License-Identifier: Apache-2.0
"""Adapters of a network as memory: those in slots reserved for them are replaced while it runs, on every rank its own
part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from sporeloom.checkpoint.adapters import Adapter, factors
from sporeloom.models.adapters import LORA_A, LORA_B
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.tensor_slice import TensorSlice


class AdapterMemory:
    """The parameters of `sporeloom.nn.multi_lora`.

    Args:
        widths: for each matrix the ranks that its slots have room for (`ranks_of_several`).
    """

    def __init__(self, engine: Engine, net: nn.Cell, widths: Mapping[str, Sequence[int]]):
        self._engine, self._net, self._widths = engine, net, widths
        self._on_cpu = engine.target == "CPU"

    def write(self, slot: int, ranks: Mapping[str, int], adapter: Adapter | None, source: int) -> None:
        """Replace the adapter in a slot, counted from 1; all ranks call it, between two runs of the network.

        Args:
            ranks: of the adapter, by the paths of its matrices; its other matrices are those of the base model.
            adapter: on rank `source`, which broadcasts it.
        """
        parameters = {parameter.name: parameter for parameter in self._net.get_parameters()}
        for path, widths in self._widths.items():
            start, width = sum(widths[: slot - 1]), widths[slot - 1]
            rank = ranks.get(path, 0)
            assert rank <= width, (path, rank, width)
            for end, axis in ((LORA_A, 0), (LORA_B, 1)):
                shape = list(self._global_shape(path + end))
                shape[axis] = width
                values = np.zeros(shape, np.float32)
                if rank:
                    values[(slice(None),) * axis + (slice(rank),)] = self._received(path, end, rank, adapter, source)
                begin = (start, 0) if axis == 0 else (0, start)
                self._put(parameters[path + end], TensorSlice(begin, tuple(shape)), values)

    def _global_shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._net.parallel_report.of(name).global_shape
        return shape

    def _received(self, path: str, end: str, rank: int, adapter: Adapter | None, source: int) -> NDArray[Any]:
        """A or B of a matrix, from the rank that has the adapter."""
        if adapter is not None:
            value = np.ascontiguousarray(factors(adapter, path)[end == LORA_B])
        else:
            outer, inner = self._global_shape(path + LORA_B)[0], self._global_shape(path + LORA_A)[1]
            value = np.zeros((rank, inner) if end == LORA_A else (outer, rank), np.float32)
        return self._engine.broadcast(value, source)

    def _put(self, parameter: Parameter, block: TensorSlice, values: NDArray[Any]) -> None:
        """Write a block of a parameter, as far as this rank holds it."""
        held = self._engine.held_slice(parameter.name, self._global_shape(parameter.name))
        common = held and block.overlap(held)
        if held is None or common is None:
            return
        new, where = values[common.within(block).slices], common.within(held).slices
        if self._on_cpu:  # the array is the memory that graphs compute with
            parameter.asnumpy()[where] = new
        else:
            changed = parameter.asnumpy().copy()
            changed[where] = new
            parameter.set_data(Tensor(changed, dtype=parameter.dtype), slice_shape=parameter.sliced)
