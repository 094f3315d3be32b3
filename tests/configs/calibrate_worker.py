# SPDX-License-Identifier: Apache-2.0
"""Graphs that are measured, for tests."""

import numpy as np
from mindspore import ops

from sporeloom.calibration import graphs
from sporeloom.calibration.cases import collective_cell
from sporeloom.calibration.samples import PADDING

TIMES = 2
RESULTS = {
    "AllReduce": lambda x: x,
    "AllGather": lambda x: np.concatenate([x, x]),
    "ReduceScatter": lambda x: x[: len(x) // 2],
    "AlltoAll": lambda x: x,
}


def exchanged():
    """Kind -> shapes that a graph with two collectives gives to the function in their place."""
    graphs.start()
    found = {}
    for kind, result in RESULTS.items():
        seen = []

        def exchange(x, result=result, seen=seen):
            seen.append(list(x.shape))
            return result(x)

        x = np.ones((4, 8), np.float32)
        graphs.load(graphs.Repeated(collective_cell(kind, 2), TIMES, 1), [x] * TIMES, exchange)()
        found[kind] = seen
    return found


def operators():
    """Kinds of the operators in a graph that repeats one: none is optimized away."""
    graphs.start()
    kept = []
    compile_for_one_device = graphs.compile_for_one_device

    def kinds(*arguments):
        model = compile_for_one_device(*arguments)
        names = {f"REF::{primitive.name}": primitive.op_type for primitive in model.primitives}
        kept.extend(names.get(node.op_type, node.op_type) for node in model.graph.node)
        return model

    graphs.compile_for_one_device = kinds
    try:
        x = np.ones((4, 8), np.float32)
        graphs.load(graphs.Repeated(graphs.Gradient(ops.GeLU()), 3, 2), [x] * 6, padding=PADDING)()
    finally:
        graphs.compile_for_one_device = compile_for_one_device
    return kept
