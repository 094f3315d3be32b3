# SPDX-License-Identifier: Apache-2.0
"""Replaces the collectives of a partitioned graph by Custom nodes that communicate between CPU processes.

MindSpore's CPU backend supports few collectives, and only for some groups and types. Therefore all are replaced, each by a
`Custom` node of kind pyfunc that calls a function of `transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.bfloat16 import Widened, in_bfloat16, widen_bfloat16
from sporeloom.runtime.cpu.flash import exchange_flash_attention
from sporeloom.runtime.cpu.inlining import inline_functions
from sporeloom.runtime.cpu.ordering import Message, order_messages
from sporeloom.runtime.cpu.partition import DECIDES_BY_DATA
from sporeloom.runtime.cpu.pyfunc import add_pyfunc_primitive
from sporeloom.runtime.cpu.transport import Array, Collectives, Transport
from sporeloom.runtime.places import place_of

REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}

Direction = tuple[str, int]
"""Send or Receive, and the other rank."""


class LoweringError(RuntimeError):
    """The graph communicates in a way that CPU processes do not support."""


def collective_nodes(model: mind_ir.ModelProto) -> Iterator[tuple[mind_ir.NodeProto, mind_ir.PrimitiveProto]]:
    """Every communicating node with its primitive, in graph order."""
    primitives = {p.name: p for p in model.primitives if any(names_group(a) for a in p.attribute)}
    for graph in (model.graph, *model.functions):
        for node in graph.node:
            primitive = primitives.get(node.op_type.removeprefix("REF::"))
            if primitive is not None:
                yield node, primitive


def names_group(attribute: mind_ir.AttributeProto) -> bool:
    """Whether an attribute names a communication group; the `group` of a convolution is a number."""
    return attribute.name == "group" and attribute.type == mind_ir.AttributeProto.STRING


def attributes(primitive: mind_ir.PrimitiveProto) -> dict[str, Any]:
    """Attributes of a primitive by name, as numbers or texts."""
    values: dict[str, Any] = {}
    for a in primitive.attribute:
        values[a.name] = a.s.decode() if a.type == mind_ir.AttributeProto.STRING else a.i
    return values


def lower(
    model: mind_ir.ModelProto,
    transport: Transport,
    groups: dict[str, list[int]],
    program: str,
    among: Sequence[int] | None = None,
) -> tuple[set[str], Widened]:
    """Replace every collective of `model`, in place, and order them without deadlocks; before that replace what CPUs do
    not support: functions, moves to the host, FlashAttention, bfloat16. Returns the names of the results of
    collectives, and the values that were bfloat16.

    Args:
        program: name that distinguishes the messages of several graphs.
        among: the ranks that have a graph of that name (default: all).

    Raises:
        ConfigError: the network branches on data.
        LoweringError: a communication operator is unsupported, or inside a control-flow branch.
        TransportError: the graphs of a group's ranks do not contain the same collectives.
    """
    if any(primitive.op_type == "Switch" for primitive in model.primitives):
        raise ConfigError(f"the network {DECIDES_BY_DATA}")
    inline_functions(model)
    _keep_where_it_is(model)
    exchange_flash_attention(model)
    widened = widen_bfloat16(model)
    counts: dict[str, int] = {}
    messages: dict[str, Message] = {}
    _take_broadcasts_apart(model)
    nodes = list(collective_nodes(model))
    outside, places = {node.name for node in model.graph.node}, _places_of_tags(nodes, groups)
    for node, primitive in nodes:
        values = attributes(primitive)
        ranks, kind = groups[values["group"]], primitive.op_type
        if node.name not in outside:
            raise LoweringError(f"{kind} on ranks {ranks} lies in a control-flow branch, where no order can be kept")
        if kind in ("Send", "Receive"):
            message = _point_to_point_message(
                _direction(kind, values, groups), values["sr_tag"], transport.rank, places
            )
            run = _point_to_point(message, transport, program)
        else:
            group = values["group"]
            counts[group] = counts.get(group, -1) + 1
            what = f"{kind} {values.get('op', '')} {list(output_of(node).dims)}"
            message = Message("collective", tuple(ranks), f"{what}, number {counts[group]} of {group}")
            run = _collective(kind, values, Collectives(transport, ranks, (program, message.tag)))
        messages[node.output[0]] = message
        run = in_bfloat16(run) if node.output[0] in widened.values else run
        run = transport.watched(f"{kind} of {place_of(node.domain)}, ranks {', '.join(map(str, message.ranks))}", run)
        node.op_type = add_pyfunc_primitive(model, run, is_scalar=not output_of(node).dims)
    order_messages(model, messages, transport, program, among)
    return set(messages), widened


def _keep_where_it_is(model: mind_ir.ModelProto) -> None:
    """Remove moves to the host and back: a CPU process has one memory."""
    moves = {f"REF::{p.name}" for p in model.primitives if p.op_type == "MoveTo"}
    moved = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type in moves}
    if not moved:
        return
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            while name in moved:
                name = moved[name]
            node.input[place] = name
    kept = [mind_ir.NodeProto.FromString(n.SerializeToString()) for n in model.graph.node if n.op_type not in moves]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _places_of_tags(
    nodes: Sequence[tuple[mind_ir.NodeProto, mind_ir.PrimitiveProto]], groups: dict[str, list[int]]
) -> dict[Direction, list[int]]:
    """The tags of each direction in order, across groups. MindSpore counts tags over all compilations of a process, so
    those of sender and receiver differ if one graph is from the compilation cache. Their order is the same."""
    tags: dict[Direction, set[int]] = {}
    for _, primitive in nodes:
        if primitive.op_type in ("Send", "Receive"):
            values = attributes(primitive)
            tags.setdefault(_direction(primitive.op_type, values, groups), set()).add(values["sr_tag"])
    return {direction: sorted(found) for direction, found in tags.items()}


def _direction(kind: str, values: dict[str, Any], groups: dict[str, list[int]]) -> Direction:
    return kind, groups[values["group"]][values["dest_rank" if kind == "Send" else "src_rank"]]


def _point_to_point_message(
    direction: Direction, sr_tag: int, rank: int, places: dict[Direction, list[int]]
) -> Message:
    (kind, peer), tag = direction, str(places[direction].index(sr_tag))
    return Message("send", (rank, peer), tag) if kind == "Send" else Message("receive", (peer, rank), tag)


def _point_to_point(message: Message, transport: Transport, program: str) -> Callable[[Array], Array]:
    (source, target), tag = message.ranks, (program, "point-to-point", message.tag)

    def send(x: Array) -> Array:
        transport.send(target, tag, x)
        return x.copy()

    def receive(_: Array) -> Array:
        return transport.receive(source, tag)

    return send if message.kind == "send" else receive


def _collective(kind: str, values: dict[str, Any], group: Collectives) -> Callable[[Array], Array]:
    if kind == "AllReduce":
        reduce = REDUCTIONS[values["op"]]
        return lambda x: group.all_reduce(x, reduce)
    if kind == "ReduceScatter":
        reduce = REDUCTIONS[values["op"]]
        return lambda x: group.reduce_scatter(x, reduce)
    if kind == "AllGather":
        return lambda x: group.all_gather(x)
    if kind in ("AlltoAll", "AllToAll"):
        return lambda x: group.all_to_all(x, values["split_dim"], values["concat_dim"])
    if kind == "Broadcast":
        return lambda x: group.broadcast(x, values["root_rank"])
    raise LoweringError(f"{kind} on group {group.group} has no CPU execution")


def _take_broadcasts_apart(model: mind_ir.ModelProto) -> None:
    """Replace a Broadcast of a tuple by a tuple of broadcasts of one tensor each."""
    broadcasts = [node.name for node, primitive in collective_nodes(model) if primitive.op_type == "Broadcast"]
    for graph in (model.graph, *model.functions):
        producers = {node.output[0]: node for node in graph.node}
        for place, node in reversed(list(enumerate(graph.node))):
            if node.name not in broadcasts:
                continue
            make_tuple, parts = producers[node.input[0]], []
            for i, source in enumerate(make_tuple.input):
                part = mind_ir.NodeProto(input=[source], output=[f"{node.name}.{i}"], name=f"{node.name}.{i}")
                part.op_type, part.domain = node.op_type, node.domain
                shape = part.attribute.add(name="shape", type=mind_ir.AttributeProto.TENSORS)
                shape.tensors.extend(next(a for a in node.attribute if a.name == "shape").values[i].tensors)
                parts.append(part)
            node.op_type = make_tuple.op_type
            node.input[:] = [part.name for part in parts]
            later = list(graph.node)[place:]
            del graph.node[place:]
            graph.node.extend([*parts, *later])


def output_of(node: mind_ir.NodeProto) -> mind_ir.TensorProto:
    """Shape and type of a node's result."""
    return next(a for a in node.attribute if a.name == "shape").tensors[0]
