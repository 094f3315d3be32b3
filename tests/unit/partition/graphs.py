# SPDX-License-Identifier: Apache-2.0
"""Graphs of operators, computed on one device as they are written, and by all ranks once they are sharded."""

import numpy as np
from kinds import COMPUTE
from more_kinds import COMPUTE as MORE
from ranks import communicated, shard

from sporeloom.partition.graph import Graph, IsFirst, Node, RankOffset, TensorType
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.propagate import shard_graph
from sporeloom.partition.sharded_graph import COLLECTIVE_OF

STEP_OF = {kind: step for step, kind in COLLECTIVE_OF.items()}
COMPUTE_ALL = {**COMPUTE, **MORE, "Mystery": lambda x: np.sort(x, 0) * 2, "Assign": lambda _, value, *monad: value}


def type_of(value):
    return TensorType(np.shape(value), str(np.asarray(value).dtype))


def of_primitive(attributes):
    """Those that a NumPy function takes."""
    return {name: value for name, value in attributes.items() if not name.startswith("side_effect")}


class Builder:
    """Writes a graph, and computes it on one device meanwhile."""

    def __init__(self):
        self.graph, self.values = Graph({}, {}, [], []), {}

    def tensor(self, name, value, is_parameter=False):
        (self.graph.parameters if is_parameter else self.graph.inputs)[name] = type_of(value)
        self.values[name] = value
        return name

    def constant(self, value):
        name = f"c{len(self.values)}"
        self.graph.nodes.append(Node("Constant", (), (name,), (None,), value=value))
        self.values[name] = value
        return name

    def value(self, name):
        return tuple(map(self.values.__getitem__, name)) if isinstance(name, tuple) else self.values[name]

    def node(self, kind, *inputs, path="", **attributes):
        names = [
            i if isinstance(i, str) or (isinstance(i, tuple) and i and i[0] in self.values) else None for i in inputs
        ]
        names = [self.constant(i) if n is None else n for n, i in zip(names, inputs, strict=True)]
        result = COMPUTE_ALL[kind](*map(self.value, names), **of_primitive(attributes))
        results = result if isinstance(result, tuple) else (result,)
        outputs = tuple(f"{kind}{len(self.values)}.{i}" for i in range(len(results)))
        self.values.update(zip(outputs, results, strict=True))
        types = tuple(map(type_of, results))
        self.graph.nodes.append(Node(kind, tuple(names), outputs, types, attributes, path))
        return outputs[0]


def on_all_ranks(sharded, builder, parameters, grid):
    """What each rank holds of every value."""
    held = {}
    for name in builder.graph.parameters:
        layout = ValueLayout(parameters.get(name, ((),) * np.ndim(builder.values[name])))
        held[name] = [shard(builder.values[name], layout, rank, grid) for rank in range(grid.size)]
    for name in builder.graph.inputs:
        held[name] = [builder.values[name]] * grid.size

    def given(name, rank):
        return tuple(held[n][rank] for n in name) if isinstance(name, tuple) else held[name][rank]

    for node in sharded.graph.nodes:
        if node.kind == "Constant":
            v = node.value
            held[node.outputs[0]] = [
                grid.index(rank, v.axes) * v.stride
                if isinstance(v, RankOffset)
                else float(grid.index(rank, v.axes) == 0)
                if isinstance(v, IsFirst)
                else v
                for rank in range(grid.size)
            ]
        elif node.kind in STEP_OF:
            a = node.attributes
            step = STEP_OF[node.kind]
            held[node.outputs[0]] = communicated(
                step, held[node.inputs[0]], a["axes"], grid, a.get("dim", 0), a.get("to_dim", 0), a.get("op", "sum")
            )
        else:
            more = of_primitive(node.attributes)
            results = [
                COMPUTE_ALL[node.kind](*(given(n, rank) for n in node.inputs), **more) for rank in range(grid.size)
            ]
            results = [r if isinstance(r, tuple) else (r,) for r in results]
            for position, name in enumerate(node.outputs):
                held[name] = [r[position] for r in results]
        for name, type in zip(node.outputs, node.types, strict=True):
            assert type is None or np.shape(held[name][0]) == type.shape, (node, np.shape(held[name][0]))
    return held


def check(builder, outputs, grid, parameters=None, inputs=None, pinned=None):
    """Every rank ends with what one device has."""
    builder.graph.outputs = list(outputs)
    sharded = shard_graph(builder.graph, grid, parameters or {}, inputs or {}, pinned)
    held = on_all_ranks(sharded, builder, parameters or {}, grid)
    for name, written in zip(outputs, sharded.graph.outputs, strict=True):
        for of_rank in held[written]:
            np.testing.assert_allclose(of_rank, builder.values[name], rtol=1e-9, atol=1e-9, err_msg=name)
    return sharded


def sent(sharded):
    return sorted(
        (c.kind, c.axes, c.elements) for c in sharded.communications if c.consumer != "an output of the graph"
    )
