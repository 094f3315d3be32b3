# SPDX-License-Identifier: Apache-2.0
"""Ranks that run as devices do, with stand-ins for what MindSpore communicates by on these; for test_device_graphs.

Graphs, groups, channels and their order are those of devices. Only what is executed is not: messages between the processes
take the place of `mindspore.communication` and of the communication operators in the graphs, which CPUs do not have.
"""

import contextlib
import dataclasses
import itertools

import mindspore as ms
import numpy as np
import schedule_worker
from mindspore import Tensor

from sporeloom.certification.training import decoder_batches
from sporeloom.mindspore_compat.device import pin_cpu
from sporeloom.models.family import family_module, size_config
from sporeloom.parallel.parallelize import parallelize
from sporeloom.runtime import engine
from sporeloom.runtime.cpu import lowering
from sporeloom.runtime.cpu.processes import CpuProcesses
from sporeloom.runtime.cpu.transport import Collectives, Transport
from sporeloom.runtime.environment import job_name, launched_rank
from sporeloom.runtime.spmd.devices import Communication, DeviceProgram, SpmdDevices
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import strategy_of

jobs = itertools.count()


class StandInCommunication(Communication):
    """Knows no tags, and only groups that were created with the same ranks, in the same order, by all of them."""

    def __init__(self, transport):
        super().__init__(transport.rank)
        self.transport = transport

    def create_group(self, name, ranks):
        assert ranks == sorted(ranks)
        given = self.transport.gather_values([name, ranks], "create group", ranks)  # as HCCL, waits for the others
        assert given == [[name, ranks]] * len(ranks), given

    def send(self, tensor, target, group):
        assert self.groups[group] == sorted((self.rank, target))
        self.transport.send(target, ("channel", group), tensor.asnumpy())

    def receive(self, tensor, source, group):
        assert self.groups[group] == sorted((self.rank, source))
        array = self.transport.receive(source, ("channel", group))
        assert (array.shape, Tensor(array).dtype) == (tuple(tensor.shape), tensor.dtype)
        return Tensor(array)

    def broadcast(self, tensor, source, group):
        ranks = self.groups[group]
        return Tensor(Collectives(self.transport, ranks, group).broadcast(tensor.asnumpy(), ranks.index(source)))


class StandInDevices(SpmdDevices):
    """Its own messages, those of a Backend, are CPU processes'."""

    broadcast, broadcast_value, max_over_ranks, sum_over_ranks = (
        getattr(CpuProcesses, name) for name in ("broadcast", "broadcast_value", "max_over_ranks", "sum_over_ranks")
    )

    def __init__(self, strategy, rank, transport):
        super().__init__(strategy, rank, StandInCommunication(transport))
        self.transport = transport

    @classmethod
    def join(cls, strategy):
        pin_cpu()
        rank = launched_rank()
        return cls(strategy, rank, Transport(rank, strategy.mesh.size, f"{job_name()}-devices{next(jobs)}"))

    def bytes_of_first(self, content):
        group = Collectives(self.transport, range(self.strategy.mesh.size), "bytes of first")
        return group.broadcast(np.frombuffer(content, np.uint8), 0).tobytes()

    def load(self, graph, owners, name, among):
        assert set(graph.groups) <= set(self.communication.groups)
        order, lowering.order_messages = lowering.order_messages, lambda *_: None  # that of devices has to do
        try:
            lowering.lower(graph.model, self.transport, graph.groups, name, among)
        finally:
            lowering.order_messages = order
        return DeviceProgram(graph, owners)

    def close(self):
        self.transport.close()


@contextlib.contextmanager
def stand_ins(changes):
    """Within it ranks run as devices do, and models of `schedule_worker` are changed so."""
    join, model = engine._join, schedule_worker.MODEL
    engine._join = lambda strategy, target: StandInDevices.join(strategy)
    schedule_worker.MODEL = model | changes
    try:
        yield
    finally:
        engine._join, schedule_worker.MODEL = join, model


def train(cases, out, changes):
    """As `schedule_worker.train`."""
    with stand_ins(changes):
        return schedule_worker.train(cases, dict.fromkeys(cases, changes["num_layers"]), out)


def evaluate(settings, changes):
    """The loss of a batch without gradients, as each rank knows it."""
    with stand_ins(changes):
        strategy = strategy_of(settings) if settings else SINGLE_DEVICE
        started = engine.Engine.start(strategy)
        config = dataclasses.replace(size_config("pangu", "tiny"), **schedule_worker.MODEL)
        ms.set_seed(3)
        net = family_module("pangu", "model").ModelWithLoss(config).set_train(False)
        parallelize(net, strategy)
        loss = started.run(net, *next(decoder_batches(config, schedule_worker.BATCH)))
        started.close()
        return float(loss.asnumpy().reshape(()))
