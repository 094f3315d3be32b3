# SPDX-License-Identifier: Apache-2.0
"""A common order of all messages of a job, so that ranks cannot deadlock.

MindSpore runs independent nodes of a graph in any order, each on a thread that a waiting collective occupies. Ranks that wait
in different collectives with all threads occupied would wait forever. Therefore all ranks merge the dependencies of messages
in their graphs and sort them once, and each rank chains its messages in this order. This suffices even with one thread:
consider the first unfinished message in the order. All messages before it are finished, so no rank that takes part in it
waits elsewhere, and nothing occupies the threads needed to reach it. Sends are in the chain as well: a send never waits, but
a receive that took the only thread before it would keep the send from its receiver.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.transport import Transport, TransportError


class Message(NamedTuple):
    """The identity of a message, which its nodes on all ranks share."""

    kind: str
    """`collective`, `send` or `receive`."""
    ranks: tuple[int, ...]
    """The group of a collective; the source and the target of a send or receive."""
    tag: str


Dependencies = dict[Message, list[Message]]
"""Message of one rank -> messages that must be finished before it."""


def order_messages(
    model: mind_ir.ModelProto,
    messages: Mapping[str, Message],
    transport: Transport,
    program: str,
    among: Sequence[int] | None = None,
) -> None:
    """Order the messages of this rank's graph in the common order of all ranks.

    Args:
        messages: name of a node's output -> message.
        among: the ranks that have a graph (default: all of the job).

    Raises:
        TransportError: a message is sent twice or never, or the graphs have a cyclic dependency.
    """
    if twice := [m for m, count in Counter(messages.values()).items() if count > 1]:
        raise TransportError(
            f"rank {transport.rank} holds {twice[0]} twice: one cannot be distinguished from the other"
        )
    mine = to_lists(dependencies(model.graph, messages))
    ranks = [from_lists(lists) for lists in transport.gather_values(mine, (program, "order"), among)]
    chain(model, messages, common_order(dict(zip(among or range(transport.size), ranks, strict=True))))


def to_lists(rank: Dependencies) -> list[Any]:
    """Serialize dependencies: each message, and the indices of the messages that it depends on."""
    numbers = {message: number for number, message in enumerate(rank)}
    return [[*message, [numbers[n] for n in needed]] for message, needed in rank.items()]


def from_lists(lists: Sequence[Any]) -> Dependencies:
    """The inverse of `to_lists`."""
    messages = [Message(kind, tuple(ranks), tag) for kind, ranks, tag, _ in lists]
    return {m: [messages[number] for number in entry[3]] for m, entry in zip(messages, lists, strict=True)}


def dependencies(graph: mind_ir.GraphProto, messages: Mapping[str, Message]) -> Dependencies:
    """The order of messages that the graph of one rank requires."""
    before: dict[str, frozenset[Message]] = {}
    result: Dependencies = {}
    for node in graph.node:  # in topological order
        needed = frozenset().union(*(before.get(name, frozenset()) for name in node.input))
        message = messages.get(node.output[0])
        if message is not None:
            result[message] = sorted(needed)
            needed = frozenset([message])
        before[node.output[0]] = needed
    return result


def common_order(ranks: Mapping[int, Dependencies]) -> list[Message]:
    """An order that satisfies every rank, equal wherever it is computed.

    Raises:
        TransportError: there is none, or a rank waits for a message that another never sends.
    """
    joined: dict[Message, dict[Message, None]] = {}
    holders: dict[Message, list[int]] = {}
    for rank, messages in ranks.items():
        for message, needed in messages.items():
            holders.setdefault(message, []).append(rank)
            joined.setdefault(message, {}).update(dict.fromkeys(needed))
            if message.kind == "receive":
                joined[message][message._replace(kind="send")] = None
    for message in joined:
        if message.kind == "collective" and holders[message] != sorted(message.ranks):
            raise TransportError(f"only ranks {holders[message]} of {list(message.ranks)} do the {message.tag}")
        if message.kind == "receive" and message._replace(kind="send") not in holders:
            source, target = message.ranks
            raise TransportError(
                f"rank {target} waits for message {message.tag} of rank {source}, which never sends it: a weight that two "
                "stages use has to be used in Cells that the rules name as layers, first_stage or last_stage"
            )
    try:
        return list(graphlib.TopologicalSorter(joined).static_order())
    except graphlib.CycleError as error:
        raise TransportError(f"the graphs of the ranks wait for each other: {error.args[1]}") from None


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
