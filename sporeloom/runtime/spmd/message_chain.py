# SPDX-License-Identifier: Apache-2.0
"""Messages of a rank's graph, chained so that each waits for the one before it."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sporeloom.mindspore_compat.names import mind_ir


class Message(NamedTuple):
    """The identity of a collective, which its nodes on all ranks share."""

    ranks: tuple[int, ...]
    tag: str


def chain(model: mind_ir.ModelProto, messages: Mapping[str, Message], order: Sequence[Message]) -> None:
    """Make each message of the graph depend on the previous one in `order`."""
    graph = model.graph
    depend = model.primitives.add(name="sporeloom_depend", op_type="Depend", prim_type=mind_ir.PrimitiveProto.PRIMITIVE)
    depend.attribute.add(name="side_effect_propagate", type=mind_ir.AttributeProto.INT64, i=1)
    nodes = {messages[node.output[0]]: node for node in graph.node if node.output[0] in messages}
    producers = {node.output[0]: node for node in graph.node}
    added: list[mind_ir.NodeProto] = []
    previous: mind_ir.NodeProto | None = None
    for message in order:
        if message not in nodes:
            continue
        node = nodes[message]
        if previous is not None:
            name = f"{node.output[0]}.turn"
            after = mind_ir.NodeProto(input=[node.input[0], previous.output[0]], output=[name], name=name)
            after.op_type, after.domain = f"REF::{depend.name}", node.domain
            after.attribute.append(_shape(node.input[0], producers, graph))
            node.input[0] = name
            added.append(after)
        previous = node
    graph.node.extend(added)
    _sort(graph)


def _shape(name: str, producers: Mapping[str, mind_ir.NodeProto], graph: mind_ir.GraphProto) -> mind_ir.AttributeProto:
    """The attribute with the shape and type of a value, as in MindIR nodes."""
    if name in producers:  # a constant has a value instead of a shape
        tensor = next(a for a in producers[name].attribute if a.name in ("shape", "value")).tensors[0]
    else:
        tensor = next((p for p in graph.parameter if p.name == name), None)
        tensor = tensor or next(i for i in graph.input if i.name == name).tensor[0]
    shape = mind_ir.AttributeProto(name="shape", type=mind_ir.AttributeProto.TENSORS)
    shape.tensors.add(dims=tensor.dims, data_type=tensor.data_type)
    return shape


def _sort(graph: mind_ir.GraphProto) -> None:
    """Sort the nodes topologically, as MindSpore requires."""
    outputs = {node.output[0] for node in graph.node}
    needed = {node.output[0]: [i for i in node.input if i in outputs] for node in graph.node}
    place = {name: i for i, name in enumerate(graphlib.TopologicalSorter(needed).static_order())}
    graph.node.sort(key=lambda node: place[node.output[0]])
