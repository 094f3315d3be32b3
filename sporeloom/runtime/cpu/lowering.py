# SPDX-License-Identifier: Apache-2.0
"""Replaces the collectives of a rank's graph by Custom nodes that communicate between CPU processes.

MindSpore's CPU backend supports few collectives, and only for some groups and types. Therefore all are replaced, each by a
`Custom` node of kind pyfunc that calls a function of `transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.bfloat16 import Widened, in_bfloat16, widen_bfloat16
from sporeloom.runtime.cpu.flash import exchange_flash_attention
from sporeloom.runtime.cpu.grouped import exchange_grouped_products
from sporeloom.runtime.cpu.ordering import order_messages
from sporeloom.runtime.cpu.pyfunc import add_pyfunc_primitive
from sporeloom.runtime.cpu.recorder import FlightRecorder
from sporeloom.runtime.cpu.transport import Array, Collectives, Transport
from sporeloom.runtime.places import place_of
from sporeloom.runtime.spmd.collectives import attributes, collective_nodes, output_of
from sporeloom.runtime.spmd.message_chain import Message

REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


ADDED_DOMAIN = "Default/sharded/"
"""Beginning of the domains of nodes that the partitioner adds."""


class LoweringError(RuntimeError):
    """The graph communicates in a way that CPU processes do not support."""


def lower(
    model: mind_ir.ModelProto,
    transport: Transport,
    groups: Mapping[str, Sequence[int]],
    program: str,
    among: Sequence[int] | None = None,
    recorder: FlightRecorder | None = None,
) -> tuple[set[str], Widened]:
    """Replace every collective of `model`, in place, and order them without deadlocks; before that replace what CPUs do
    not support: FlashAttention, grouped products, bfloat16. Returns the names of the results of collectives, and the
    values that were bfloat16.

    Args:
        program: name that distinguishes the messages of several graphs.
        among: the ranks that have a graph of that name (default: all).
        recorder: records what each collective gets.

    Raises:
        LoweringError: a communication operator is unsupported.
        TransportError: the graphs of a group's ranks do not contain the same collectives.
    """
    exchange_flash_attention(model)
    exchange_grouped_products(model)
    widened = widen_bfloat16(model)
    counts: dict[str, int] = {}
    messages: dict[str, Message] = {}
    producers = {node.output[0]: node for node in model.graph.node}
    for node, primitive in list(collective_nodes(model)):
        values = attributes(primitive)
        group, kind = values["group"], primitive.op_type
        ranks = groups[group]
        counts[group] = counts.get(group, -1) + 1
        what = f"{kind} {values.get('op', '')} {list(output_of(node).dims)}"
        message = Message(tuple(ranks), f"{what}, number {counts[group]} of {group}")
        run = _collective(kind, values, Collectives(transport, ranks, (program, message.tag)))
        messages[node.output[0]] = message
        run = in_bfloat16(run) if node.output[0] in widened.values else run
        place = place_of(_domain(node, producers))
        where = f"{kind} of {place}, ranks {', '.join(map(str, message.ranks))}"
        run = transport.watched(where, run)
        run = recorder.watched(node.output[0], message.tag, where, run) if recorder else run
        node.op_type = add_pyfunc_primitive(model, run, is_scalar=not output_of(node).dims)
    order_messages(model, messages, transport, program, among)
    return set(messages), widened


def _domain(node: mind_ir.NodeProto, producers: Mapping[str, mind_ir.NodeProto]) -> str:
    """Domain of the node whose result a collective sends: those that the partitioner adds are in no Cell themselves."""
    source = node
    while source.domain.startswith(ADDED_DOMAIN) and source.input and source.input[0] in producers:
        source = producers[source.input[0]]
    return str(source.domain)


def _collective(kind: str, values: dict[str, Any], group: Collectives) -> Callable[[Array], Array]:
    if kind == "AllReduce":
        reduce = REDUCTIONS[values["op"]]
        return lambda x: group.all_reduce(x, reduce)
    if kind == "ReduceScatter":
        reduce = REDUCTIONS[values["op"]]
        return lambda x: group.reduce_scatter(x, reduce)
    if kind == "AllGather":
        return lambda x: group.all_gather(x)
    if kind == "AlltoAll":
        return lambda x: group.all_to_all(x, values["split_dim"], values["concat_dim"])
    raise LoweringError(f"{kind} on group {group.group} has no CPU execution")
