# SPDX-License-Identifier: Apache-2.0
"""Broadcasting on CPUs: an input that an operator would broadcast is tiled to the shape of the result before.

MindSpore's CPU kernels of these operators keep two indices of 8 bytes for each element of a result whose inputs have
different shapes, as long as the graph exists: four times a float32 result, for every such operator. A tiled input
exists as short as any other value. The results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sporeloom.partition.graph import Graph, Name, Node, TensorType
from sporeloom.strategy.layout import Shape

KINDS = frozenset(("Add", "Sub", "Mul", "Div", "RealDiv"))
"""Operators whose kernels keep indices."""
SMALLEST = 1 << 16
"""Elements of a result from which on tiling is worth an operator: 1 MB of indices."""


def tile_broadcasts(graph: Graph) -> Graph:
    """`graph` with tiled inputs in place of those that operators of KINDS would broadcast, but for those of one element,
    which kernels read without indices."""
    types: dict[Name, TensorType] = {**graph.parameters, **graph.inputs}
    tiled: dict[tuple[Name, Shape], Name] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        types |= {name: type for name, type in zip(node.outputs, node.types, strict=True) if type is not None}
        inputs = list(node.inputs)
        for place, name in enumerate(_broadcast(node, types)):
            if name is None:
                continue
            shape = types[node.outputs[0]].shape
            if (name, shape) not in tiled:
                nodes += (made := _tile(name, types[name], shape, node))
                tiled[name, shape] = made[-1].outputs[0]
            inputs[place] = tiled[name, shape]
        nodes.append(replace(node, inputs=tuple(inputs)))
    return Graph(graph.parameters, graph.inputs, nodes, graph.outputs)


def _broadcast(node: Node, types: dict[Name, TensorType]) -> Iterator[Name | None]:
    """Each input: its name if it is to be tiled, else None."""
    result = node.types[0]
    is_large = node.kind in KINDS and result is not None and result.num_elements >= SMALLEST
    for name in node.inputs:
        type = types.get(name) if is_large and isinstance(name, str) else None
        to_tile = type is not None and result is not None and type.shape != result.shape and type.num_elements > 1
        yield name if to_tile and isinstance(name, str) else None


def _tile(name: Name, type: TensorType, shape: Shape, user: Node) -> list[Node]:
    """Operators that give `name` the shape `shape`."""
    prefix, ranked = f"{user.outputs[0]}.of.{name}", (1,) * (len(shape) - len(type.shape)) + type.shape
    dims = Node("Constant", (), (f"{prefix}.dims",), (None,), value=ranked)
    reshape = Node(
        "Reshape", (name, dims.outputs[0]), (f"{prefix}.ranked",), (TensorType(ranked, type.dtype),), scope=user.scope
    )
    nodes = [dims, reshape] if ranked != type.shape else []
    source = reshape.outputs[0] if nodes else name
    repeats = tuple(new // old for new, old in zip(shape, ranked, strict=True))
    times = Node("Constant", (), (f"{prefix}.times",), (None,), value=repeats)
    tile = Node(
        "Tile", (source, times.outputs[0]), (f"{prefix}.tiled",), (TensorType(shape, type.dtype),), scope=user.scope
    )
    return [*nodes, times, tile]
