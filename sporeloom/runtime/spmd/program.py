# SPDX-License-Identifier: Apache-2.0
"""One rank's graph, loaded by MindSpore, and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from sporeloom.core.by_identity import ByIdentity
from sporeloom.core.errors import ConfigError
from sporeloom.core.scratch import scratch_folder
from sporeloom.runtime.compiler import without_collection
from sporeloom.runtime.spmd.rank_graph import RankGraph
from sporeloom.strategy.tensor_slice import TensorSlice


@dataclass(frozen=True)
class Source:
    """The source of a parameter's value."""

    shape: tuple[int, ...]
    read: Callable[[TensorSlice], NDArray[Any]]
    """Returns a part of the value."""

    @classmethod
    def of_zeros(cls, shape: Sequence[int]) -> Source:
        """The source of parameters that are set later."""
        return cls(tuple(shape), lambda part: np.zeros(part.shape, np.float32))

    @property
    def full(self) -> TensorSlice:
        return TensorSlice.full(self.shape)


SOURCES = ByIdentity[Parameter, Source]()
"""Sources of the parameters whose values are read once their layouts are known."""
FLOAT32_COPIES = ByIdentity[Parameter, Parameter]()
"""Copies of the bfloat16 parameters that CPU processes compute with."""


class LoadedProgram:
    """A rank's graph, loaded by MindSpore and ready to run. Its parameters share storage with those of its Cell.

    Args:
        owners: name -> parameter of the Cell.

    Raises:
        ConfigError: the graph has a parameter that is not among them.
    """

    def __init__(self, graph: RankGraph, owners: Mapping[str, Parameter]):
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
    def graphs(self) -> Sequence[RankGraph]:
        return [self.graph]

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Let MindSpore select the kernels; otherwise the first `run` does so."""
        self.cell.phase = "graph_load_from_mindir"  # as GraphCell.__call__ sets it
        self.cell._add_attr("graph_load_from_mindir", self.cell.graph)
        with without_collection():
            self.cell.compile(*inputs)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        for parameter, owner in self._pairs:
            if parameter.data_ptr() != owner.data_ptr():  # the owner has new data, such as a new learning rate
                parameter.set_data(owner)
        return self.cell(*inputs)


def in_float32(parameter: Parameter) -> Parameter:
    """The float32 copy of a bfloat16 parameter, such as a cache or a moment, which all programs of CPU processes share."""
    if (copy := FLOAT32_COPIES.get(parameter)) is None:
        copy = Parameter(parameter.astype(ms.float32), requires_grad=False)
        FLOAT32_COPIES.set(parameter, copy)
    return copy


def storage(parameter: Parameter) -> Parameter:
    """The parameter that holds the value: the float32 copy, where CPU processes compute with one."""
    copy = FLOAT32_COPIES.get(parameter)
    return parameter if copy is None else copy


def materialize(parameters: Any, graph: RankGraph) -> None:
    """Initialize each parameter, then keep this rank's shard of it.

    All ranks draw all initial values in the same order, so they agree with each other and with one device. A parameter with a
    `Source` is read by slices: only this rank's shard, and nothing if its stage does not use it.
    """
    held = graph.parameters
    for parameter in parameters:
        layout = graph.layouts.get(parameter.name) if parameter.name in held else None
        if source := SOURCES.get(parameter):  # MindSpore may have cut its shape already
            if parameter.name in held:
                part = layout.stored_slice(source.shape, graph.rank, graph.groups) if layout else source.full
                parameter.set_data(Tensor(source.read(part), dtype=parameter.dtype), slice_shape=True)
                parameter.init_mode = None
                SOURCES.remove(parameter)
            continue
        if parameter.sliced:
            continue
        parameter.init_data()
        if layout is not None:
            keep_slice(parameter, layout.stored_slice(tuple(parameter.shape), graph.rank, graph.groups))


def keep_slice(parameter: Parameter, part: TensorSlice) -> None:
    """Replace a full parameter by one slice of it, as MindSpore does on a device."""
    parameter.set_data(Tensor(parameter.asnumpy()[part.slices].copy(), dtype=parameter.dtype), slice_shape=True)
    parameter.sliced = True
