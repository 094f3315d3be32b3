# SPDX-License-Identifier: Apache-2.0
"""Executes one rank's graph of a Cell, on any device or in a CPU process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.scratch import scratch_folder
from sporeloom.runtime.cpu.find_nan import NanFinder
from sporeloom.runtime.cpu.lowering import lower
from sporeloom.runtime.cpu.partition import PartitionedGraph
from sporeloom.runtime.cpu.transport import Transport

_MISSING = re.compile(r"Unsupported op \[(\w+)\] on CPU")
WITHOUT_KERNEL = "one device has none either; use another operator, optimizer or step, or element type"


@dataclass(frozen=True)
class Source:
    """The source of a parameter's value, set as its attribute `source`."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], NDArray[Any]]
    """Returns a slice of the value."""

    @classmethod
    def of_zeros(cls, shape: Sequence[int]) -> Source:
        """The source of parameters that are set later."""
        return cls(tuple(shape), lambda slices: np.zeros([s.stop - s.start for s in slices], np.float32))

    @property
    def whole(self) -> tuple[slice, ...]:
        return tuple(slice(0, length) for length in self.shape)


class LoadedProgram:
    """A rank's graph, loaded by MindSpore and ready to run. Its parameters share storage with those of its Cell.

    Args:
        owners: name -> parameter of the Cell.

    Raises:
        ConfigError: the graph has a parameter that is not among them.
    """

    def __init__(self, graph: PartitionedGraph, owners: Mapping[str, Parameter]):
        self.graph = graph
        held = (parameter.name.rpartition(":")[2] for parameter in graph.model.graph.parameter)
        if lost := [name for name in held if name not in owners]:
            raise ConfigError(
                f"the graph uses the parameter {lost[0]}, which no Cell of the network or step owns: make what holds it an "
                "attribute of one"
            )
        with scratch_folder() as folder:
            path = folder / "rank.mindir"
            path.write_bytes(graph.model.SerializeToString())
            self.cell = nn.GraphCell(ms.load(str(path)))
        # Both share one storage from now on.
        self._pairs = [(parameter, owners[parameter.name]) for parameter in self.cell.get_parameters()]
        for parameter, owner in self._pairs:
            parameter.set_data(owner)

    @property
    def graphs(self) -> Sequence[PartitionedGraph]:
        return [self.graph]

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Let MindSpore select the kernels; otherwise the first `run` does so."""
        self.cell.phase = "graph_load_from_mindir"  # as GraphCell.__call__ sets it
        self.cell._add_attr("graph_load_from_mindir", self.cell.graph)
        self.cell.compile(*inputs)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        for parameter, owner in self._pairs:
            if parameter.data_ptr() != owner.data_ptr():  # the owner has new data, such as a new learning rate
                parameter.set_data(owner)
        return self.cell(*inputs)


class Program(LoadedProgram):
    """A partitioned graph in a CPU process, whose collectives are functions of `transport`."""

    def __init__(
        self,
        graph: PartitionedGraph,
        cell: nn.Cell,
        transport: Transport,
        name: str,
        nan_finder: NanFinder | None = None,
        among: Sequence[int] | None = None,
    ):
        messages, self.widened = lower(graph.model, transport, graph.groups, name, among)
        if nan_finder:
            nan_finder.watch(graph.model, messages)
        owners = {parameter.name: parameter for parameter in cell.get_parameters()}
        materialize(owners.values(), graph)
        for name in self.widened.parameters:
            owners[name] = _in_float32(owners[name])
        super().__init__(graph, owners)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        try:
            return super().run(inputs)
        except (RuntimeError, TypeError) as error:
            if missing := _MISSING.search(str(error)):
                raise ConfigError(f"MindSpore has no kernel of {missing[1]} for CPUs: {WITHOUT_KERNEL}") from None
            raise


def _in_float32(parameter: Parameter) -> Parameter:
    """The float32 copy of a bfloat16 parameter, such as a cache, which all programs share."""
    if not hasattr(parameter, "in_float32"):
        parameter.in_float32 = Parameter(parameter.astype(ms.float32), requires_grad=False)
    return parameter.in_float32


def materialize(parameters: Any, graph: PartitionedGraph) -> None:
    """Initialize each parameter, then keep this rank's shard of it.

    All ranks draw all initial values in the same order, so they agree with each other and with one device. A parameter with a
    `Source` is read by slices: only this rank's shard, and nothing if its stage does not use it.
    """
    held = graph.parameters
    for parameter in parameters:
        layout = graph.layouts.get(parameter.name) if parameter.name in held else None
        if source := getattr(parameter, "source", None):  # MindSpore may have cut its shape already
            if parameter.name in held:
                slices = layout.slices(source.shape, graph.rank, graph.groups) if layout else source.whole
                parameter.set_data(Tensor(source.read(slices), dtype=parameter.dtype), slice_shape=True)
                parameter.init_mode = parameter.source = None
            continue
        if parameter.sliced:
            continue
        parameter.init_data()
        if layout is not None:
            keep_slice(parameter, layout.slices(tuple(parameter.shape), graph.rank, graph.groups))


def keep_slice(parameter: Parameter, slices: tuple[slice, ...]) -> None:
    """Replace a full parameter by one slice of it, as MindSpore does on a device."""
    parameter.set_data(Tensor(parameter.asnumpy()[slices].copy(), dtype=parameter.dtype), slice_shape=True)
    parameter.sliced = True
