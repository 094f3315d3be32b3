# SPDX-License-Identifier: Apache-2.0
"""Run the recorded step of one rank again, alone: what other ranks sent is read from the recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from sporeloom.mindspore_compat.device import pin_cpu
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.bfloat16 import widen_bfloat16
from sporeloom.runtime.cpu.find_nan import inspect_nodes
from sporeloom.runtime.cpu.flash import exchange_flash_attention
from sporeloom.runtime.cpu.grouped import exchange_grouped_products
from sporeloom.runtime.cpu.pyfunc import add_pyfunc_primitive
from sporeloom.runtime.cpu.recorder import arrays_of
from sporeloom.runtime.cpu.recording import Array, RecordedCall, Recording, StepRecord, sha256_of
from sporeloom.runtime.spmd.collectives import collective_nodes, output_of
from sporeloom.runtime.spmd.program import LoadedProgram
from sporeloom.runtime.spmd.rank_graph import RankGraph


@dataclass(frozen=True)
class NodeResult:
    """The result of an operator in a replayed graph."""

    node: str
    place: str
    """Kind and operator, for reports; empty for a message."""
    sha256: str
    sent: str = ""
    """Hash of what the rank gave to the message."""


@dataclass
class Replay:
    """The result of a replayed step."""

    num_messages: int = 0
    num_values: int = 0
    """Outputs and parameters that were compared with the recording."""
    differences: list[str] = field(default_factory=list)
    """Values that differ from the recording, in the order of the step."""
    trace: list[list[NodeResult]] = field(default_factory=list)
    """For each call the results of its operators in topological order, if they were requested."""
    after: dict[str, Array] = field(default_factory=dict)
    """Parameters after the step, if the results of operators were requested."""


Look = Callable[[int, str, Array], object]
"""Gets the number of a call, a node and its result."""


def replay(recording: Recording, rank: int, step: int, traced: bool = False, look: Look | None = None) -> Replay:
    """Run one step of one rank again.

    Args:
        traced: whether the results of all operators are hashed.
        look: gets the results of all operators.

    Raises:
        ConfigError: there is no such record, or its file was changed.
    """
    pin_cpu()
    ms.set_context(mode=ms.GRAPH_MODE)
    record, found = recording.read(rank, step), Replay()
    owners = {name: Parameter(Tensor(record.array(each)), name=name) for name, each in record.state.items()}
    programs: dict[str, _ReplayedProgram] = {}
    for call in record.calls:
        if call.program not in programs:
            model = mind_ir.ModelProto.FromString(recording.program(rank, call.program))
            programs[call.program] = _ReplayedProgram(model, rank, owners, traced, look)
        found.trace.append(programs[call.program].replay(call, record, found))
    for name, owner in owners.items():
        after = owner.asnumpy()
        _compare(f"parameter {name} after the step", sha256_of(after), record.after[name], found)
        if look:
            found.after[name] = after
    return found


def _compare(what: str, now: str, recorded: str, found: Replay) -> None:
    found.num_values += 1
    if now != recorded:
        found.differences.append(what)


class _ReplayedProgram:
    """A graph of a rank whose messages are those of the recording."""

    def __init__(
        self,
        model: mind_ir.ModelProto,
        rank: int,
        owners: Mapping[str, Parameter],
        traced: bool,
        look: Look | None,
    ):
        self._traced, self._look, self._number = traced, look, 0
        self._messages: dict[str, Array] = {}
        """Node -> what it received in the recorded call."""
        self._sent: dict[str, str] = {}
        self._trace: dict[int, NodeResult] = {}
        exchange_flash_attention(model)
        exchange_grouped_products(model)
        widen_bfloat16(model)
        nodes = [node for node, _ in collective_nodes(model)]
        for node in nodes:
            run = self._message(node.output[0])
            node.op_type = add_pyfunc_primitive(model, run, is_scalar=not output_of(node).dims)
        self._numbers = {node.output[0]: number for number, node in enumerate(model.graph.node)}
        self._received = {node.output[0] for node in nodes}
        if traced or look:
            inspect_nodes(model, self._received, self._inspection)
        self._program = LoadedProgram(RankGraph(model, {}, {}, rank), owners)

    def replay(self, call: RecordedCall, record: StepRecord, found: Replay) -> list[NodeResult]:
        """Run the graph as in a recorded call. Returns the results of its operators."""
        self._number = next(number for number, each in enumerate(record.calls) if each is call)
        self._messages = {node: record.array(message.received) for node, message in call.messages.items()}
        self._sent = {}
        self._trace = {}
        outputs = arrays_of(self._program.run([Tensor(record.array(each)) for each in call.inputs]))
        for node, message in call.messages.items():
            _compare(f"what this rank gave to {message.place} ({call.program})", self._sent[node], message.sent, found)
        for position, (output, recorded) in enumerate(zip(outputs, call.outputs, strict=True), 1):
            _compare(f"output {position} of {call.program}", sha256_of(output), recorded, found)
        found.num_messages += len(call.messages)
        return [self._trace[at] for at in sorted(self._trace)]

    def _message(self, node: str) -> Callable[[Array], Array]:
        def run(x: Array) -> Array:
            self._sent[node] = sha256_of(x)
            received = self._messages[node]
            if self._traced:  # here, because messages without dims are not inspected
                self._trace[self._numbers[node]] = NodeResult(node, "", sha256_of(received), self._sent[node])
            if self._look:
                self._look(self._number, node, received)
            return received

        return run

    def _inspection(self, node: str, place: str) -> Callable[[Array], Array]:
        def look(x: Any) -> Array:
            if node not in self._received and self._traced:
                self._trace[self._numbers[node]] = NodeResult(node, place, sha256_of(x))
            if node not in self._received and self._look:
                self._look(self._number, node, np.array(x))
            return np.array(x)

        return look
