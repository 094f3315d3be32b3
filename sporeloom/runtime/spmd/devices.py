# SPDX-License-Identifier: Apache-2.0
"""Ascend or GPU devices that run this package's own graphs: `engine: spmd`.

Never run on Ascend hardware; compiled only. Each rank has the same graphs as a CPU process, one for each stage and pass,
with MindSpore's communication operators; the host runs the pipeline schedule. `Communication`, and the way in which a
program shares its parameters, cannot be verified without devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.communication import create_group

from sporeloom.core.log import milestone
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.partition.graph import Name, TensorType
from sporeloom.partition.rank_mindir import group_name
from sporeloom.runtime.device_backend import DeviceBackend, meet
from sporeloom.runtime.spmd.backend import SpmdBackend
from sporeloom.runtime.spmd.collectives import collective_nodes
from sporeloom.runtime.spmd.message_chain import Message, chain
from sporeloom.runtime.spmd.program import LoadedProgram, materialize
from sporeloom.runtime.spmd.rank_graph import RankGraph
from sporeloom.strategy.config import Strategy

NEVER_RUN = (
    "engine spmd on devices: our own graphs with MindSpore's communication operators. This has never been run on Ascend "
    "hardware; compare the first losses with `engine: mindspore`"
)


class Sent(Protocol):
    """A message in transit."""

    def wait(self) -> Any: ...


class Communication:
    """MindSpore's communication between devices outside of graphs. Groups are created once, with ascending ranks, and
    in the same order on all of them, because creating one waits for all of its ranks."""

    def __init__(self, rank: int):
        self.rank = rank
        self.groups: dict[str, list[int]] = {}

    def create_groups(self, groups: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Create the groups of this rank that do not exist yet. All ranks call this at the same point."""
        for name, ranks in sorted(groups, key=lambda group: (list(group[1]), group[0])):
            if self.rank in ranks and name not in self.groups:
                self.groups[name] = list(ranks)
                self.create_group(name, list(ranks))

    def create_group(self, name: str, ranks: list[int]) -> None:
        create_group(name, ranks)

    def send(self, tensor: Tensor, target: int, group: str) -> Sent | None:
        """Send without waiting for the receiver."""
        sent: Sent | None = mint.distributed.isend(tensor, target, group)
        return sent

    def receive(self, tensor: Tensor, source: int, group: str) -> Tensor:
        """Receive from `source` into the storage of `tensor`, which has the same shape and type."""
        mint.distributed.recv(tensor, source, group)
        return tensor

    def broadcast(self, tensor: Tensor, source: int, group: str) -> Tensor:
        """Broadcast from rank `source` into the storage of `tensor`."""
        mint.distributed.broadcast(tensor, source, group)
        return tensor


class DeviceExchange:
    """Messages between the devices of pipeline stages. Each direction between two ranks has its own group, and so its
    own stream: in one stream both ranks would send and neither receive. Messages of a direction are received in the
    order of sending, because groups have no tags."""

    def __init__(self, communication: Communication):
        self.communication, self.rank = communication, communication.rank
        self._sent: list[tuple[Sent | None, Tensor]] = []
        """Messages in transit, with their tensors, which must not be overwritten before they are sent."""

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.communication.create_groups((_channel(*pair), sorted(pair)) for pair in pairs)

    def send(self, peer: int, tag: tuple[str, Name, int], value: Tensor, type: TensorType) -> None:
        self._sent.append((self.communication.send(value, peer, _channel(self.rank, peer)), value))

    def receive(self, peer: int, tag: tuple[str, Name, int], type: TensorType) -> Tensor:
        return self.communication.receive(self.zeros(type), peer, _channel(peer, self.rank))

    def settle(self) -> None:
        for sent, _ in self._sent:
            if sent is not None:
                sent.wait()
        self._sent = []

    def zeros(self, type: TensorType) -> Tensor:
        return Tensor(np.zeros(type.shape, np.float32 if type.dtype == "bfloat16" else type.dtype)).astype(_dtype(type))

    def add(self, total: Tensor | None, value: Tensor) -> Tensor:
        return value if total is None else ops.add(total, value)

    def larger(self, total: Tensor | None, value: Tensor) -> Tensor:
        return value if total is None else ops.maximum(total, value)

    def sum_of(self, total: Tensor) -> Tensor:
        return total

    def join(self, values: Sequence[Tensor], dim: int) -> Tensor:
        return ops.cat(list(values), dim)

    def broadcast(self, value: Tensor | None, type: TensorType, ranks: Sequence[int], source: int, tag: Any) -> Tensor:
        name = group_name(ranks)
        self.communication.create_groups([(name, ranks)])
        return self.communication.broadcast(self.zeros(type) if value is None else value, ranks[source], name)


def _channel(source: int, target: int) -> str:
    return f"from_{source}_to_{target}"


def _dtype(type: TensorType) -> Any:
    return getattr(ms, "bool_" if type.dtype == "bool" else type.dtype)


def put_in_order(model: mind_ir.ModelProto) -> None:
    """Chain the collectives of a rank's graph in place, so that each waits for the one before it.

    The graphs of communicating ranks are derived from one graph and have its order of operators, so that no two ranks wait
    for each other.
    """
    messages = {node.output[0]: Message((), str(number)) for number, (node, _) in enumerate(collective_nodes(model))}
    if messages:
        chain(model, messages, list(messages.values()))


class DeviceProgram(LoadedProgram):
    """A rank's graph on its device."""

    def run(self, inputs: Sequence[Tensor]) -> Any:
        result = super().run(inputs)
        for parameter, owner in self._pairs:
            if parameter.data_ptr() != owner.data_ptr():  # the first run moves it from the host to the device
                owner.set_data(parameter)
        return result


class SpmdDevices(SpmdBackend, DeviceBackend):
    """One of several devices, which runs this package's own graphs."""

    def __init__(self, strategy: Strategy, rank: int, communication: Communication):
        super().__init__(strategy, rank)
        self.communication = communication

    @classmethod
    def join(cls, strategy: Strategy) -> SpmdDevices:
        """Join the other processes of the job.

        Raises:
            ConfigError: there are more or fewer of them than the strategy's mesh has ranks.
        """
        rank = meet(strategy)
        if rank == strategy.mesh.first_rank_of_last_stage:
            milestone(NEVER_RUN)
        return cls(strategy, rank, Communication(rank))

    def make_program(self, graph: RankGraph, cell: nn.Cell, name: str, among: Sequence[int]) -> DeviceProgram:
        self.communication.create_groups(graph.groups.items())
        put_in_order(graph.model)
        owners = {parameter.name: parameter for parameter in cell.get_parameters()}
        materialize(owners.values(), graph)
        return self.load(graph, owners, name, among)

    def load(self, graph: RankGraph, owners: dict[str, Any], name: str, among: Sequence[int]) -> DeviceProgram:
        """Load a graph whose groups exist and whose parameters have their values."""
        return DeviceProgram(graph, owners)

    def exchange(self) -> DeviceExchange:
        return DeviceExchange(self.communication)

    def bytes_of_first(self, content: bytes) -> bytes:
        return self.share_bytes(content, 0)
