# SPDX-License-Identifier: Apache-2.0
"""The order of waiting texts, against a list that is searched."""

import random

import pytest

from sporeloom.serve.fair_queue import FairQueue


class Slow:
    """The same order by its definition: of the client that was served longest ago the oldest text of the lowest priority."""

    def __init__(self):
        self.waiting, self.turns, self.clock = [], {}, 0

    def put(self, item, client, priority):
        self.clock += 1
        if not any(other == client for _, other, _ in self.waiting):
            self.turns[client] = self.clock  # it stands behind those who wait
        self.waiting.append((item, client, priority))

    def pop(self):
        self.clock += 1
        client = min((each[1] for each in self.waiting), key=lambda client: self.turns[client])
        found = min((each for each in self.waiting if each[1] == client), key=lambda each: each[2])
        self.waiting.remove(found)
        self.turns[client] = self.clock
        return found[0]

    def remove(self, item):
        self.waiting = [each for each in self.waiting if each[0] != item]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_order_of_the_definition(seed):
    draw, queue, slow = random.Random(seed), FairQueue(), Slow()
    for number in range(300):
        kind = draw.random()
        if kind < 0.5:
            asked = number, draw.randrange(4), draw.choice([0, 0, 0, -1, 7])
            queue.put(*asked)
            slow.put(*asked)
        elif kind < 0.9 and len(queue):
            assert queue.pop() == slow.pop()
        elif slow.waiting:
            item = draw.choice(slow.waiting)[0]
            assert queue.remove(item) and not queue.remove(item)
            slow.remove(item)
        assert len(queue) == len(slow.waiting) and sorted(queue) == sorted(each[0] for each in slow.waiting)


def test_who_sends_many_delays_another_by_one():
    queue = FairQueue()
    for number in range(100):
        queue.put(("many", number), "many", 0)
    queue.put(("one", 0), "one", 0)
    assert [queue.pop()[0] for _ in range(3)] == ["many", "one", "many"]


def test_low_priorities_take_no_turn_of_another_client():
    queue = FairQueue()
    for number in range(10):
        queue.put(("many", number), "many", -1000 - number)
    queue.put(("one", 0), "one", 0)
    assert [queue.pop() for _ in range(3)] == [("many", 9), ("one", 0), ("many", 8)]
