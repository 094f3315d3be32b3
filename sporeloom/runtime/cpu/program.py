# SPDX-License-Identifier: Apache-2.0
"""One rank's graph in a CPU process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, nn

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.cpu.find_nan import NanFinder
from sporeloom.runtime.cpu.lowering import lower
from sporeloom.runtime.cpu.products import PRODUCT_LIBRARIES, exchange_products
from sporeloom.runtime.cpu.recorder import FlightRecorder
from sporeloom.runtime.cpu.transport import Transport
from sporeloom.runtime.spmd.program import LoadedProgram, in_float32, materialize
from sporeloom.runtime.spmd.rank_graph import RankGraph
from sporeloom.runtime.trace import TRACE, now

_MISSING = re.compile(r"Unsupported op \[(\w+)\] on CPU")
WITHOUT_KERNEL = "one device has none either; use another operator, optimizer or step, or element type"


class Program(LoadedProgram):
    """A graph in a CPU process, whose collectives are functions of `transport`."""

    def __init__(
        self,
        graph: RankGraph,
        cell: nn.Cell,
        transport: Transport,
        name: str,
        nan_finder: NanFinder | None = None,
        among: Sequence[int] | None = None,
        recorder: FlightRecorder | None = None,
    ):
        self.name, self.recorder = name, recorder
        messages, self.widened = lower(graph.model, transport, graph.groups, name, among, recorder)
        if library := PRODUCT_LIBRARIES.get(cell):
            exchange_products(graph.model, library)
        if nan_finder:
            nan_finder.watch(graph.model, messages)
        owners = {parameter.name: parameter for parameter in cell.get_parameters()}
        materialize(owners.values(), graph)
        for widened in self.widened.parameters:
            owners[widened] = in_float32(owners[widened])
        super().__init__(graph, owners)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        begin = now()
        try:
            if self.recorder is None:
                return super().run(inputs)
            held = [(parameter.name, owner) for parameter, owner in self._pairs]
            return self.recorder.call(self.name, held, inputs, lambda: super(Program, self).run(inputs))
        except (RuntimeError, TypeError) as error:
            if missing := _MISSING.search(str(error)):
                raise ConfigError(f"MindSpore has no kernel of {missing[1]} for CPUs: {WITHOUT_KERNEL}") from None
            raise
        finally:
            TRACE.add("graph", self.name, begin)
