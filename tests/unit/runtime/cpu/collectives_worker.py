# SPDX-License-Identifier: Apache-2.0
"""Runs each collective as a graph in 4 CPU processes and compares it with NumPy, for test_collectives."""

import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _cell_graph_executor

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.program import Program
from sporeloom.runtime.cpu.transport import Transport
from sporeloom.runtime.environment import job_name
from sporeloom.runtime.spmd.rank_graph import RankGraph

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from mindspore_partitioner import WORLD, virtual_ascend

SIZE, RANK = 4, int(os.environ["RANK_ID"])
PAIR = [RANK % 2, RANK % 2 + 2]  # (0 2) and (1 3)
INPUTS = [np.random.RandomState(rank).randn(8, 6).astype(np.float32) for rank in range(SIZE)]


class One(nn.Cell):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def construct(self, x):
        return self.op(x)


class Crossed(nn.Cell):
    """Independent reductions that every other rank has the other way round: without an order they wait for ever."""

    def __init__(self):
        super().__init__()
        self.sum, self.max = ops.AllReduce("sum", group=WORLD), ops.AllReduce("max", group="everybody")
        self.even = RANK % 2 == 0

    def construct(self, x):
        if self.even:
            total = self.sum(x)
            return total + self.max(x)
        most = self.max(x)
        return most + self.sum(x)


def execute(make, transport, name):
    with virtual_ascend(RANK, SIZE) as groups:
        groups["pair"], groups["everybody"] = PAIR, list(range(SIZE))
        cell = make()
        x = Tensor(np.zeros((8, 6), np.float32))
        phase, _ = _cell_graph_executor.compile(cell, x, phase=f"export.mindir.{name}", do_convert=False)
        proto = _cell_graph_executor._graph_executor.get_func_graph_proto(phase, "mind_ir", False)
        model = mind_ir.ModelProto.FromString(proto)
        graph = RankGraph(model, {}, dict(groups), RANK)
    return Program(graph, cell, transport, name).run([Tensor(INPUTS[RANK])]).asnumpy()


def scattered(parts, ranks):
    return np.split(parts, len(ranks))[ranks.index(RANK)]


def cases():
    world = list(range(SIZE))
    for group, ranks in ((WORLD, world), ("pair", PAIR)):
        arrays = [INPUTS[rank] for rank in ranks]
        for op, combine in (("sum", np.sum), ("max", np.max)):
            yield (
                f"AllReduce {op} {group}",
                lambda o=op, g=group: One(ops.AllReduce(o, group=g)),
                combine(arrays, axis=0),
            )
        yield f"AllGather {group}", lambda g=group: One(ops.AllGather(group=g)), np.concatenate(arrays)
        summed = scattered(np.sum(arrays, axis=0), ranks)
        yield f"ReduceScatter {group}", lambda g=group: One(ops.ReduceScatter("sum", group=g)), summed
        swapped = np.concatenate([scattered(array, ranks) for array in arrays], axis=1)
        yield f"AlltoAll {group}", lambda r=ranks, g=group: One(ops.AlltoAll(len(r), 0, 1, group=g)), swapped
    yield "Crossed", Crossed, np.sum(INPUTS, axis=0) + np.max(INPUTS, axis=0)


if __name__ == "__main__":
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE, inter_op_parallel_num=1)  # one wait at a time: an order must be kept
    if os.environ.get("MS_ROLE") != "MS_SCHED":
        connection = Transport(RANK, SIZE, job_name())
        for case, build, expected in cases():
            got = execute(build, connection, case)
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6, err_msg=case)
            print(f"right: {case}", flush=True)
        connection.close()
