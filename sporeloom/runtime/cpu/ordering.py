# SPDX-License-Identifier: Apache-2.0
"""A common order of all messages of a job, so that ranks cannot deadlock.

MindSpore runs independent nodes of a graph in any order, each on a thread that a waiting collective occupies. Ranks that wait
in different collectives with all threads occupied would wait forever. Therefore all ranks merge the dependencies of messages
in their graphs and sort them once, and each rank chains its messages in this order. This suffices even with one thread:
consider the first unfinished message in the order. All messages before it are finished, so no rank that takes part in it
waits elsewhere, and nothing occupies the threads needed to reach it.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.transport import Transport, TransportError
from sporeloom.runtime.spmd.message_chain import Message, chain

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
    messages = [Message(tuple(ranks), tag) for ranks, tag, _ in lists]
    return {m: [messages[number] for number in entry[2]] for m, entry in zip(messages, lists, strict=True)}


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
        TransportError: there is none, or a rank takes part in a collective that another lacks.
    """
    joined: dict[Message, dict[Message, None]] = {}
    holders: dict[Message, list[int]] = {}
    for rank, messages in ranks.items():
        for message, needed in messages.items():
            holders.setdefault(message, []).append(rank)
            joined.setdefault(message, {}).update(dict.fromkeys(needed))
    for message in joined:
        if holders[message] != sorted(message.ranks):
            raise TransportError(f"only ranks {holders[message]} of {list(message.ranks)} do the {message.tag}")
    try:
        return list(graphlib.TopologicalSorter(joined).static_order())
    except graphlib.CycleError as error:
        raise TransportError(f"the graphs of the ranks wait for each other: {error.args[1]}") from None
