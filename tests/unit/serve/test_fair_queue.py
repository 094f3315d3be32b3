# SPDX-License-Identifier: Apache-2.0
"""The order of waiting texts, against a list that is searched."""

import random

import pytest

from sporeloom.serve.fair_queue import FairQueue


class Slow:
    """The same order by its definition: of the lowest priority the client that was served longest ago, its oldest text."""

    def __init__(self):
        self.waiting, self.turns, self.clock = [], {}, 0

    def put(self, item, client, priority):
        self.clock += 1
        if not any((c, p) == (client, priority) for _, c, p in self.waiting):
            self.turns[client, priority] = self.clock  # it stands behind those who wait
        self.waiting.append((item, client, priority))

    def pop(self):
        self.clock += 1
        lowest = min(priority for _, _, priority in self.waiting)
        found = min((e for e in self.waiting if e[2] == lowest), key=lambda e: self.turns[e[1], lowest])
        self.waiting.remove(found)
        self.turns[found[1], lowest] = self.clock
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
