# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model on one device, then on all ranks by `sporeloom.partition`, in the processes of one job."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

from sporeloom.models.family import family_module, size_config
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.cpu.executor import Program
from sporeloom.runtime.cpu.partition import describe_inputs
from sporeloom.runtime.cpu.processes import CpuProcesses
from sporeloom.runtime.cpu.spmd import compile_for_one_device, device_grid, partition_for_rank
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import strategy_of

STEPS, SMALL = 3, {"vocab_size": 128, "hidden_size": 64, "seq_len": 32, "num_layers": 2, "dropout_rate": 0.0}
COLUMNS = ("query.weight", "key.weight", "value.weight", "up.weight", "gate.weight")
COLUMN_BIASES = tuple(name.replace("weight", "bias") for name in COLUMNS)
ROWS = ("attention.output.weight", "mlp.down.weight")


def build(family, size):
    ms.set_seed(3)
    net = family_module(family, "model").ModelWithLoss(dataclasses.replace(size_config(family, size), **SMALL))
    report = parallelize(net, SINGLE_DEVICE)
    return TrainStep(net, nn.Momentum(net.trainable_params(), 0.1, 0.9), report, 0, max_grad_norm=0.5)


def layout_of(name, shape, options):
    """Megatron's scheme, and with `zero` all of that over dp, too."""
    dims = [()] * len(shape)
    if name.endswith((*COLUMNS, *COLUMN_BIASES, "embedding.word.weight", "head.weight")):
        dims[0] = ("tp",)
    elif name.endswith(ROWS):
        dims[1] = ("tp",)
    if "zero" in options and dims and shape[0] % (4 if dims[0] else 2) == 0:
        dims[0] = (*dims[0], "dp")
    return tuple(dims)


def train(family: str, size: str, options: list[str], out: str) -> None:
    """Writes OUT.RANK.json: losses and norms of one device and of the ranks, the largest difference of any weight of this
    rank, what the ranks send, and operators that every rank computed whole."""
    random = np.random.default_rng(0)
    tokens, labels = random.integers(0, SMALL["vocab_size"], (2, 8, SMALL["seq_len"])).astype(np.int32)
    positions = np.tile(np.arange(SMALL["seq_len"], dtype=np.int32), (8, 1))
    weights = (random.random(tokens.shape) / tokens.size).astype(np.float32)
    inputs = [ms.Tensor(x) for x in (tokens, labels, positions, weights)]
    one_device = build(family, size)
    expected = [[float(x) for x in one_device(*inputs)] for _ in range(STEPS)]
    strategy = strategy_of({"mesh": {"dp": 2, "tp": 2}})
    backend, grid = CpuProcesses.join(strategy), device_grid(strategy.mesh)
    step = build(family, size)
    model = compile_for_one_device(step, describe_inputs(inputs))
    names = {p.name.rpartition(":")[2]: tuple(p.dims) for p in model.graph.parameter}
    graph, sharded = partition_for_rank(
        model,
        grid,
        {name: layout_of(name, shape, options) for name, shape in names.items()},
        [(("dp",), ())] * len(inputs),
        backend.rank,
    )
    program = Program(graph, step, backend.transport, "spmd")
    found = [[float(x) for x in program.run(inputs)] for _ in range(STEPS)]
    differences = [
        np.abs(mine.asnumpy() - whole.asnumpy()[graph.layouts[mine.name].slices(whole.shape, backend.rank, {})]).max()
        for mine, whole in zip(step.weights, one_device.weights, strict=True)
    ]
    result = {
        "expected": expected,
        "found": found,
        "difference": float(max(differences)),
        "communications": Counter(f"{c.kind} over {','.join(c.axes)}" for c in sharded.communications),
        "unsharded": sharded.unsharded,
        "sharded_parameters": sum(not layout.layout.is_replicated for layout in graph.layouts.values()),
    }
    Path(f"{out}.{backend.rank}.json").write_text(json.dumps(result))
    backend.close()
