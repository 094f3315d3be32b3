# SPDX-License-Identifier: Apache-2.0
"""Random graphs on 2 to 8 ranks, each with one thread that takes ready nodes in any order: none ever stands still."""

import random

import pytest

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.ordering import common_order, dependencies, from_lists, to_lists
from sporeloom.runtime.spmd.message_chain import Message, chain

SEEDS = range(120)


def tensor_shape(node):
    node.attribute.add(name="shape", type=mind_ir.AttributeProto.TENSORS).tensors.add(dims=[1], data_type=1)


class Rank:
    """The graph of one rank while it grows."""

    def __init__(self):
        self.model = mind_ir.ModelProto()
        self.model.graph.parameter.add(name="x", dims=[1], data_type=1)
        self.values, self.messages = ["x"], {}

    def add(self, source, message=None):
        name = f"n{len(self.values)}"
        node = self.model.graph.node.add(input=[source], output=[name], name=name, op_type="REF::any")
        tensor_shape(node)
        self.values.append(name)
        if message:
            self.messages[name] = message


def random_job(seed):
    """Graphs that could run with threads enough: made message by message, each after some of what its rank had before."""
    draw = random.Random(seed)
    ranks = [Rank() for _ in range(draw.randint(2, 8))]
    for number in range(draw.randint(2, 24)):
        group = tuple(sorted(draw.sample(range(len(ranks)), draw.randint(2, len(ranks)))))
        sides = [(member, Message(group, str(number))) for member in group]
        for rank, message in sides:
            ranks[rank].add(draw.choice(ranks[rank].values), message)
            for _ in range(draw.randint(0, 2)):
                ranks[rank].add(draw.choice(ranks[rank].values))
    return ranks


def stands_still(ranks, seed):
    """Run all ranks with one thread each. Returns what each waits in for ever; empty if all came to their end."""
    draw = random.Random(seed)
    todo = [{node.output[0]: list(node.input) for node in rank.model.graph.node} for rank in ranks]
    waiting, arrived = {}, {}
    while any(todo):
        moved = False
        for number in draw.sample(range(len(ranks)), len(ranks)):
            nodes, messages = todo[number], ranks[number].messages
            if number not in waiting:
                ready = [name for name, inputs in nodes.items() if not any(i in nodes for i in inputs)]
                if not ready:
                    continue
                waiting[number], moved = draw.choice(ready), True
                if message := messages.get(waiting[number]):
                    arrived.setdefault(message, set()).add(number)
            message = messages.get(waiting[number])
            if message is not None and arrived[message] != set(message.ranks):
                continue
            del nodes[waiting.pop(number)]
            moved = True
        if not moved:
            return {number: ranks[number].messages[name] for number, name in waiting.items()}
    return {}


def chained(ranks):
    order = common_order(
        {i: from_lists(to_lists(dependencies(rank.model.graph, rank.messages))) for i, rank in enumerate(ranks)}
    )
    for rank in ranks:
        chain(rank.model, rank.messages, order)
    return ranks


@pytest.mark.parametrize("seed", SEEDS)
def test_chained_graphs_come_to_their_end(seed):
    ranks = chained(random_job(seed))
    for schedule in range(10):
        assert stands_still(ranks, schedule) == {}


def test_the_simulator_sees_what_goes_wrong_without_a_chain():
    assert sum(bool(stands_still(random_job(seed), seed)) for seed in SEEDS) > 50
