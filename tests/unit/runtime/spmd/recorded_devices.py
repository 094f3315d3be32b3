# SPDX-License-Identifier: Apache-2.0
"""The devices of a job, one after the other in this process: each makes its graphs and runs none."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np

from sporeloom.certification.training import decoder_batches
from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.models.family import family_module, size_config
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.step import TrainStep
from sporeloom.partition.sharded_graph import item_size
from sporeloom.runtime.spmd.collectives import attributes, collective_nodes, output_of
from sporeloom.runtime.spmd.devices import Communication, DeviceProgram, SpmdDevices
from sporeloom.strategy.loader import strategy_of
from sporeloom.train.optim import AdamW

MODEL = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "seq_len": 16, "num_layers": 2}
EXPERTS = {"experts": {"num_experts": 4, "experts_per_token": 2, "capacity_factor": 1.0}}
BATCH = 8


class RecordedCommunication(Communication):
    """Writes down which groups it creates, in order."""

    def __init__(self, rank):
        super().__init__(rank)
        self.created = []

    def create_group(self, name, ranks):
        self.created.append((name, ranks))


class RecordedDevices(SpmdDevices):
    """Rank 0 comes first; the others are given what it shared."""

    def __init__(self, strategy, rank, of_first):
        super().__init__(strategy, rank, RecordedCommunication(rank))
        self.of_first, self.seen, self.loaded = of_first, 0, []

    def bytes_of_first(self, content):
        if self.rank == 0:
            self.of_first.append(content)
        self.seen += 1
        return self.of_first[self.seen - 1]

    def agree(self, problems):
        if problems:
            raise ConfigError(problems)

    def load(self, graph, owners, name, among):
        program = DeviceProgram(graph, owners)
        self.loaded.append((name, list(among), program))
        return program


def network(more):
    """A tiny model with its loss, the same each time."""
    ms.set_seed(3)
    return family_module("pangu", "model").ModelWithLoss(_config(more))


def _config(more):
    return dataclasses.replace(size_config("pangu", "tiny"), **MODEL, **more)


def recorded(settings, more):
    """All ranks of a training step of a tiny model under a strategy."""
    strategy, ranks, of_first = strategy_of({"engine": "spmd", **settings}), [], []
    ms.set_context(mode=ms.GRAPH_MODE)
    for rank in range(strategy.mesh.size):
        net = network(more)
        report = parallelize(net, strategy)
        backend = RecordedDevices(strategy, rank, of_first)
        step = TrainStep(wrap(net, strategy), AdamW(net.trainable_params()), report, rank).set_train()
        backend.program(step, next(decoder_batches(_config(more), BATCH)))
        ranks.append(backend)
    return ranks


@dataclass(frozen=True)
class Collective:
    """A collective in one rank's graph, which must match those of the other ranks at the same position of its group."""

    group: str
    kind: str
    how: tuple[tuple[str, Any], ...]
    """Attributes of MindSpore's operator except for the group."""
    num_bytes: int


def collectives_of(model):
    """The collectives of a rank's graph, in order of execution."""
    found = []
    for node, primitive in collective_nodes(model):
        known, output = attributes(primitive), output_of(node)
        group = known.pop("group")
        dtype = mind_ir.TensorProto.DataType.Name(output.data_type).lower()
        size = int(np.prod(output.dims, dtype=np.int64)) * item_size(DTYPES.get(dtype, dtype))
        found.append(Collective(group, primitive.op_type, tuple(sorted(known.items())), size))
    return found


DTYPES = {"float": "float32", "double": "float64"}
"""MindIR's names of element types, where they differ from NumPy's."""
